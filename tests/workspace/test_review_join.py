"""A join that fails: what the branch may still read goes to nobody before it is over."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.workspace.forms import BOTH
from tests.workspace.scene import BYTES, SLAB, scene
from workspace.errors import DriverError
from workspace.holding import OPEN, Held, Holding
from workspace.workspace import Workspace

pytestmark = pytest.mark.parametrize("form", BOTH, indirect=True)


def whole(tensor: Any) -> Any:
    return tensor.tensor() if hasattr(tensor, "tensor") else tensor


def failing(*_: object) -> None:
    raise DriverError("out of order")


def reused(ws: Workspace, device: Any) -> None:
    """As many bytes on the same stream, twice."""
    for _ in range(2):
        with ws.lease(BYTES, N=SLAB) as lease:
            device.launch("again", writes=[whole(lease.x)])


@pytest.mark.parametrize("strategy", ["caching", "event_fenced", "per_stream"])
@pytest.mark.parametrize("verb", ["record", "wait"])
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "without"])
def test_a_branch_that_was_not_joined_is_declared(form: None, strategy: str, verb: str, declared: bool) -> None:
    """The error arrives, and the lease around the fork is released with the use it could not wait for."""
    device, ws = scene(strategy, steady=True, reserve=SLAB)
    main, one, two = ws.stream("main"), ws.stream("one"), ws.stream("two")
    with ws.on(main), pytest.MonkeyPatch.context() as patch:
        reused(ws, device)
        if not declared:
            patch.setattr(Holding, "declare", lambda *_: None)
        with ws.lease(BYTES, N=SLAB) as lease:
            device.launch("write", writes=[whole(lease.x)])
            with pytest.MonkeyPatch.context() as broken, pytest.raises(DriverError, match="out of order"):
                with ws.fork(one, two) as branch:
                    for stream in (one, two):
                        with branch(stream):
                            device.launch("read", reads=[whole(lease.x)])
                    broken.setattr(ws.driver, verb, failing)
        reused(ws, device)
    assert (device.verdict() == "SAFE") == declared
    assert not ws.timeline.state.held and (strategy == "caching" or ws.snapshot().allocated == 0)


def test_an_interrupted_join_declares_what_is_left(form: None) -> None:
    """Ctrl-C between two branches: the second is not joined either."""
    device, ws = scene(steady=True, reserve=SLAB)
    main, one, two = ws.stream("main"), ws.stream("one"), ws.stream("two")
    record = ws.driver.record

    def interrupted(event: int, stream: int) -> None:
        if stream == one.key:
            raise KeyboardInterrupt
        record(event, stream)

    with ws.on(main):
        reused(ws, device)
        with ws.lease(BYTES, N=SLAB) as lease:
            with pytest.MonkeyPatch.context() as broken, pytest.raises(KeyboardInterrupt):
                with ws.fork(one, two) as branch:
                    for stream in (one, two):
                        with branch(stream):
                            device.launch("read", reads=[lease.x])
                    broken.setattr(ws.driver, "record", interrupted)
        reused(ws, device)
    assert device.verdict() == "SAFE" and not ws.timeline.state.held


class Interrupted:
    """A lock for whose first owner Ctrl-C comes while it waits."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.waited = False

    def acquire(self) -> bool:
        if not self.waited:
            self.waited = True
            raise KeyboardInterrupt
        return bool(self.lock.acquire())

    def release(self) -> None:
        self.lock.release()

    def _is_owned(self) -> bool:
        return bool(self.lock._is_owned())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_interrupted_before_the_first_join(form: None) -> None:
    """Ctrl-C while the fork waits for another thread's acquire: none of its branches is joined."""
    device, ws = scene(steady=True, reserve=SLAB)
    main, one = ws.stream("main"), ws.stream("one")
    with ws.on(main):
        reused(ws, device)
        with ws.lease(BYTES, N=SLAB) as lease:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                with ws.fork(one) as branch:
                    with branch(one):
                        device.launch("read", reads=[lease.x])
                    patch.setattr(ws.timeline, "lock", Interrupted(ws.timeline.lock))
        reused(ws, device)
    assert device.verdict() == "SAFE" and not ws.timeline.state.held


def test_the_error_of_the_body_arrives_with_a_note(form: None) -> None:
    """And the branch is declared all the same; a branch that was joined is not."""
    device, ws = scene(steady=True, reserve=SLAB)
    main, one, two = ws.stream("main"), ws.stream("one"), ws.stream("two")
    record = ws.driver.record
    with ws.on(main):
        with ws.lease(BYTES, N=SLAB) as lease:
            with pytest.MonkeyPatch.context() as broken, pytest.raises(ValueError, match="of the body") as raised:
                with ws.fork(one, two):
                    broken.setattr(
                        ws.driver, "record", lambda event, key: failing() if key == two.key else record(event, key)
                    )
                    raise ValueError("of the body")
            assert lease.uses == {two.id: OPEN}
        assert "out of order" in raised.value.__notes__[0]
    assert not ws.timeline.state.held


def test_a_lease_acquired_in_a_branch_gets_the_parent_declared(form: None) -> None:
    """As after a join, and not the branch: that is its own stream."""
    _, ws = scene(steady=True, reserve=SLAB)
    main, one = ws.stream("main"), ws.stream("one")
    with ws.on(main):
        with pytest.MonkeyPatch.context() as broken, pytest.raises(DriverError, match="out of order"):
            with ws.fork(one) as branch:
                with branch(one):
                    lease = ws.acquire(BYTES, N=SLAB)
                broken.setattr(ws.driver, "wait", failing)
    assert lease.uses == {main.id: OPEN}
    lease.release()


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "without"])
def test_a_release_elsewhere_while_the_fork_waits_to_leave(form: None, counted: bool) -> None:
    """Another thread releases the lease and leases the bytes: the branches are not joined yet, and are its uses."""
    device, ws = scene(reserve=SLAB)
    main, one, other = ws.stream("main"), ws.stream("one"), ws.stream("other")
    with ws.on(main):
        lease = ws.acquire(BYTES, N=SLAB)
        device.launch("write", writes=[lease.x])

    def beside() -> None:
        lease.release()
        with torch.no_grad(), ws.on(other):
            reused(ws, device)

    class Overtaken(Interrupted):
        """A lock that the other thread has first."""

        def acquire(self) -> bool:
            if not self.waited:
                self.waited = True
                thread = threading.Thread(target=beside)
                thread.start()
                thread.join()
            return bool(self.lock.acquire())

    with ws.on(main), pytest.MonkeyPatch.context() as patch:
        if not counted:
            patch.setattr(Held, "forks_around", lambda *_: [])
        with ws.fork(one) as branch:
            with branch(one):
                device.launch("read", reads=[lease.x])
            patch.setattr(ws.timeline, "lock", Overtaken(ws.timeline.lock))
    assert (device.verdict() == "SAFE") == counted
