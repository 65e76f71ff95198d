"""The timeline's lock in C++: as threading.RLock, for any number of threads."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.workspace.scene import scene
from workspace import native

pytestmark = pytest.mark.skipif(not native.built(), reason="the C++ form is not built")


@pytest.fixture
def lock() -> Any:
    return native.extension().Lock()


def in_thread(function: Callable[[], object]) -> Any:
    """What a call in another thread returns or raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return found[0]


def test_a_timeline_has_it() -> None:
    """Whatever form runs: the Python one uses it through ``with``."""
    _, ws = scene()
    assert type(ws.timeline.lock) is native.extension().Lock


def test_a_thread_may_take_it_again(lock: Any) -> None:
    """And gives it back as often; it is its own as long."""
    assert not lock._is_owned()
    with lock:
        assert lock._is_owned() and lock.acquire() is True
        assert not in_thread(lock._is_owned)
        lock.release()
        assert lock._is_owned()
    assert not lock._is_owned()


def test_what_is_not_taken_is_not_released(lock: Any) -> None:
    """Nor by another thread."""
    assert isinstance(in_thread(lock.release), RuntimeError)
    with lock:
        assert isinstance(in_thread(lock.release), RuntimeError)
    with pytest.raises(RuntimeError, match="un-acquired"):
        lock.release()


def test_another_thread_waits(lock: Any) -> None:
    """Until the last release."""
    order: list[str] = []

    def wait() -> None:
        with lock:
            order.append("second")

    with lock:
        thread = threading.Thread(target=wait)
        thread.start()
        with lock:
            time.sleep(0.05)
        time.sleep(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize("whole", [True, False], ids=["with it", "without it"])
def test_only_one_thread_is_inside(lock: Any, whole: bool) -> None:
    """Eight threads that let the others run in the middle; the control has a lock for each."""
    inside, most, rounds = [0], [0], 150

    def work() -> None:
        own = lock if whole else native.extension().Lock()
        for _ in range(rounds):
            with own, own:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert (most[0] == 1) == whole


def test_all_that_wait_get_it(lock: Any) -> None:
    """Also those that come while it changes hands, and where a release found nobody to let in."""
    got: list[int] = []

    def take(number: int) -> None:
        with lock:
            got.append(number)

    with lock:
        threads = [threading.Thread(target=take, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for _ in range(50):  # released and taken again before anybody looks
            lock.release()
            lock.acquire()
        time.sleep(0.02)
    for thread in threads:
        thread.join(10)
    assert sorted(got) == list(range(20))


def test_a_wait_is_interrupted_by_a_signal(lock: Any) -> None:
    """Its handler's exception arrives, and the lock is not this thread's; the next wait is one like any other."""

    class Rang(Exception):
        pass

    rung: list[int] = []

    def ring(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not rung:
            rung.append(1)
            raise Rang

    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pytest.raises(Rang):
            # Again and again: one that arrives just before the wait, or in the other thread, does not end it.
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            lock.acquire()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not lock._is_owned()
    done.set()
    with lock:
        assert lock._is_owned()
    thread.join(10)
