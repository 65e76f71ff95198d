"""Forks and joins: who is declared, what is stamped, and what happens when a branch fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress

import pytest
import torch

from tests.workspace.scene import BYTES, SLAB, scene, write
from workspace import Workspace
from workspace.errors import CaptureError, DriverError, ForkError, StreamError
from workspace.fork import Fork
from workspace.holding import Held, Holding
from workspace.lease import Lease
from workspace.streams import Stream


def test_a_fork_and_its_join_cost_their_own_calls_and_the_lease_none() -> None:
    """Fork to two, join, release, acquire: three records, four waits, and nothing for the bytes."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "warm", SLAB, 0)
    before = device.counters.copy()
    with ws.lease(BYTES, N=SLAB) as lease, ws.fork(one, two) as branch:
        for stream in (one, two):
            with branch(stream):
                device.launch("branch", reads=[lease.x])
    forked = device.counters - before
    assert (forked["record"], forked["wait"]) == (3, 4)
    write(device, ws, "again", SLAB, 0)
    after = device.counters - before
    assert (after["record"], after["wait"], after["query"], after["alloc"]) == (3, 4, 0, 0)
    assert device.verdict() == "SAFE"


def test_a_use_after_the_join_is_one_fence() -> None:
    """The one stream that is still at work is waited for, once."""
    device, ws = scene()
    aux, other = ws.stream("aux"), ws.stream("other")
    with ws.lease(BYTES, N=SLAB) as lease:
        with ws.fork(aux, other):
            pass
        device.launch("late", reads=[lease.x], stream=aux.key)
        lease.use(aux)
    write(device, ws, "next", SLAB, 0)
    assert ws.snapshot().fences == 1 and device.verdict() == "SAFE"


def test_a_fork_moves_no_bytes_of_other_slots() -> None:
    """Two micro-batches of one thread: a fork in one declares its branches for that one's leases only."""
    device, ws = scene(micro_batches=2)
    aux, main = ws.stream("aux"), ws.stream("main")
    with ws.slot(micro_batch=1), ws.on(main):
        held = ws.acquire(BYTES, N=SLAB)
    with ws.fork(aux):
        pass
    device.launch("elsewhere", stream=aux.key)
    with ws.slot(micro_batch=1), ws.on(main):
        held.release()
        write(device, ws, "next", SLAB, main)
    assert ws.snapshot().fences == 0


class Unknown:
    """What a control removes."""

    @staticmethod
    def branches(fork: Fork, lease: Holding) -> tuple[Stream, ...]:
        return ()

    @staticmethod
    def joined(lease: Lease, stream: Stream, epoch: int) -> None:
        pass

    @staticmethod
    def declared(lease: Lease, stream: Stream) -> None:
        pass


@pytest.mark.parametrize(
    ("seam", "verdict"), [(None, "SAFE"), ((Fork, "branches_of", Unknown.branches), "UNSAFE")], ids=["kept", "removed"]
)
def test_a_lease_released_inside_a_fork_waits_for_the_branches(
    monkeypatch: pytest.MonkeyPatch, seam: tuple[type, str, Callable[..., object]] | None, verdict: str
) -> None:
    """The branches still read it when the parent releases, so the parent's next lease comes after them."""
    if seam is not None:
        monkeypatch.setattr(*seam)
    device, ws = scene()
    aux = ws.stream("aux")
    lease = ws.acquire(BYTES, N=SLAB)
    device.launch("write", writes=[lease.x])
    with ws.fork(aux) as branch:
        with branch(aux):
            device.launch("read", reads=[lease.x])
        lease.release()
        write(device, ws, "next", SLAB, 0)
    assert device.verdict() == verdict


@pytest.mark.parametrize(
    ("seam", "verdict"), [(None, "SAFE"), ((Lease, "joined", Unknown.joined), "UNSAFE")], ids=["kept", "removed"]
)
def test_a_join_by_another_stream_than_the_acquirers_is_remembered(
    monkeypatch: pytest.MonkeyPatch, seam: tuple[type, str, Callable[..., object]] | None, verdict: str
) -> None:
    """The acquirer has joined nothing: its next lease waits for the branch, until the join and no further."""
    if seam is not None:
        monkeypatch.setattr(*seam)
    device, ws = scene()
    acquirer, aux = ws.stream("acquirer"), ws.stream("aux")
    lease = ws.acquire(BYTES, stream=acquirer, N=SLAB)
    with ws.fork(aux) as branch, branch(aux):
        device.launch("read", reads=[lease.x])
    lease.release()
    write(device, ws, "next", SLAB, acquirer)
    assert device.verdict() == verdict


@pytest.mark.parametrize(
    ("seam", "verdict"), [(None, "SAFE"), ((Lease, "declare", Unknown.declared), "UNSAFE")], ids=["kept", "removed"]
)
@pytest.mark.parametrize("released_inside", [False, True])
def test_a_lease_of_a_branch_that_outlives_the_join_may_be_used_by_the_parent(
    monkeypatch: pytest.MonkeyPatch,
    seam: tuple[type, str, Callable[..., object]] | None,
    verdict: str,
    released_inside: bool,
) -> None:
    """Also when an older lease was released inside the fork, so that as many are held after it as before."""
    if seam is not None:
        monkeypatch.setattr(*seam)
    device, ws = scene()
    aux = ws.stream("aux")
    older = ws.acquire(BYTES, N=100)
    with ws.fork(aux) as branch:
        with branch(aux):
            lease = ws.acquire(BYTES, N=SLAB)
            device.launch("write", writes=[lease.x])
        if released_inside:
            older.release()
    device.launch("read", reads=[lease.x])
    lease.release()
    write(device, ws, "next", SLAB, aux)
    assert device.verdict() == verdict


def in_a_thread(ws: Workspace, step: Callable[[], None]) -> None:
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()


def in_a_slot(ws: Workspace, step: Callable[[], None]) -> None:
    with ws.slot(micro_batch=1):
        step()


@pytest.mark.parametrize("elsewhere", [in_a_thread, in_a_slot])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("seen", [True, False])
def test_a_branch_may_run_in_another_thread_or_micro_batch(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[..., None], captured: bool, nested: bool, seen: bool
) -> None:
    """What is acquired there is the fork's, too: the parent reads it after the join. Control: nobody looks there."""
    if not seen:
        monkeypatch.setattr(Fork, "_everywhere", lambda fork: [fork._held])
    device, ws = scene(micro_batches=2)
    ws.declare(BYTES, N=SLAB, lane="main" if captured else None)
    ws.reserve()
    ws.lock()
    main, outer, aux = ws.stream("main"), ws.stream("outer"), ws.stream("aux")
    leases, helds = list[Lease](), list[Held]()

    @torch.no_grad()
    def branched() -> None:
        helds.append(ws.timeline.state.held)
        for _ in range(2):  # the second time it has been there
            with branch(aux):
                lease = ws.acquire(BYTES, N=SLAB // 2)
                device.launch("branch", writes=[lease.x])
                leases.append(lease)
        leases.pop(0).release()

    with ws.on(main), ws.capture() if captured else nullcontext() as capture:
        with ExitStack() as forks:
            if nested:  # the outer join declares its parent, too
                around = forks.enter_context(ws.fork(outer))
                forks.enter_context(around(outer))
            branch = forks.enter_context(ws.fork(aux))
            elsewhere(ws, branched)
        (lease,) = leases
        device.launch("parent", reads=[lease.x])
        lease.release()
        with ws.on(aux), ws.lease(BYTES, N=SLAB if captured else 2 * SLAB) as other:  # all that there is
            device.launch("next", writes=[other.x])
            joined = ws.event()
            joined.record()
        joined.wait()
    if capture:
        capture.graph.replay(main)
    assert device.verdict() == ("SAFE" if seen else "UNSAFE")
    assert not ws.timeline.state.held and (not helds[0] or not seen)


@pytest.mark.parametrize("around", [False, True])
def test_a_lease_may_be_released_while_its_fork_is_left(monkeypatch: pytest.MonkeyPatch, around: bool) -> None:
    """By the thread that a branch ran in, which takes no lock for it: there is nothing to declare any more."""
    device, ws = scene(steady=True)
    main, aux, two = ws.stream("main"), ws.stream("aux"), ws.stream("two")
    write(device, ws, "a shelf", SLAB, aux)
    leases: list[Lease] = []
    wait = ws.driver.wait

    def joining(event: int, stream: int) -> None:
        if leases and stream == main.key:
            leases.pop().release()
        wait(event, stream)

    monkeypatch.setattr(ws.driver, "wait", joining)
    with ws.on(main):
        if around:
            with ws.on(aux):
                lease = ws.acquire(BYTES, N=SLAB)
        with ws.fork(aux, two) as branch:
            with branch(aux):
                lease = lease if around else ws.acquire(BYTES, N=SLAB)
                device.launch("branch", writes=[lease.x])
            leases.append(lease)
    assert not leases and not ws.timeline.state.held and ws.snapshot().allocated == 0
    assert not (around and lease.uses)
    write(device, ws, "next", SLAB, aux)
    assert device.verdict() == "SAFE"


def test_a_branch_is_not_entered_elsewhere_while_its_fork_is_left() -> None:
    """It would stay among what that thread holds."""
    _, ws = scene(micro_batches=2)
    aux = ws.stream("aux")
    with ws.fork(aux) as branch:
        pass
    with ws.slot(micro_batch=1), pytest.raises(ForkError, match="while its fork is left"):
        branch._visit(ws.timeline.state.held)
    assert not any(ws.timeline.state._held.values())


def test_what_was_not_entered_is_not_left() -> None:
    """A fork says nothing, as it has nothing to join; a stream has none to go back to."""
    _, ws = scene()
    aux = ws.stream("aux")
    ws.fork(aux).__exit__(None, None, None)
    with pytest.raises(StreamError, match="was not entered"):
        ws.on(aux).__exit__(None, None, None)
    assert ws.driver.current_stream() == 0


def test_a_sibling_goes_on_after_an_inner_join() -> None:
    """An inner fork to a stream that is the outer fork's branch too: the outer one still declares it."""
    device, ws = scene()
    acquirer, one, two = ws.stream("acquirer"), ws.stream("one"), ws.stream("two")
    lease = ws.acquire(BYTES, stream=acquirer, N=SLAB)
    with ws.fork(one, two) as branch:
        with branch(one), ws.fork(two) as inner, inner(two):
            device.launch("inner", reads=[lease.x])
        with branch(two):
            device.launch("sibling", reads=[lease.x])
    lease.release()
    write(device, ws, "next", SLAB, acquirer)
    assert device.verdict() == "SAFE"


def test_a_branch_that_raises_is_joined_with_the_others() -> None:
    """Every branch is waited for, the caller's stream is current again, and the exception arrives."""
    device, ws = scene()
    aux, other = ws.stream("aux"), ws.stream("other")
    with pytest.raises(KeyError), ws.lease(BYTES, N=SLAB) as lease, ws.fork(aux, other) as branch:
        with branch(other):
            device.launch("other", reads=[lease.x])
        with branch(aux):
            device.launch("aux", reads=[lease.x])
            raise KeyError
    assert ws.driver.current_stream() == 0
    write(device, ws, "next", SLAB, 0)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 0


def test_a_join_that_fails_joins_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device refuses one record: the other branches are ordered, and the error arrives."""
    device, ws = scene()
    aux, other = ws.stream("aux"), ws.stream("other")
    record = ws.driver.record

    def failing(event: int, stream: int) -> None:
        if stream == aux.key:
            raise DriverError("record failed")
        record(event, stream)

    lease = ws.acquire(BYTES, N=SLAB)
    with pytest.raises(DriverError, match="record failed"), ws.fork(aux, other):
        monkeypatch.setattr(ws.driver, "record", failing)
    monkeypatch.undo()
    device.launch("other", reads=[lease.x], stream=other.key)
    assert ws.timeline.clocks.ordered(ws.timeline.current().id, other.id, 1)
    lease.release()


def test_a_fork_to_the_current_stream_is_refused() -> None:
    """It would wait for itself; the error names the stream."""
    _, ws = scene()
    main = ws.stream("main")
    with ws.on(main), pytest.raises(ForkError, match="main"), ws.fork(main):
        pass


def test_a_branch_belongs_to_its_fork() -> None:
    """Outside the ``with``, or on a stream that was not named, there is no branch."""
    _, ws = scene()
    aux, other = ws.stream("aux"), ws.stream("other")
    fork = ws.fork(aux)
    with pytest.raises(ForkError, match="outside its fork"):
        fork(aux)
    with fork as branch, pytest.raises(ForkError, match="not one of"):
        branch(other)
    with pytest.raises(ForkError, match="outside its fork"):
        fork(aux)


def test_a_fork_to_nothing_and_to_one_stream_twice() -> None:
    """Degenerate forks are joined like any other."""
    device, ws = scene()
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=SLAB) as lease:
        with ws.fork():
            pass
        with ws.fork(aux, aux) as branch, branch(aux):
            device.launch("aux", reads=[lease.x])
    write(device, ws, "next", SLAB, 0)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 0


@pytest.mark.parametrize("stream", [None, "aux", 1.5])
def test_a_branch_on_no_stream_is_refused(stream: object) -> None:
    _, ws = scene()
    with ws.fork(ws.stream("aux")) as branch:
        with pytest.raises(StreamError):
            branch(stream)


@pytest.mark.parametrize("strategy", ["caching", "event_fenced", "per_stream"])
@pytest.mark.parametrize("ends", ["end", "foreign end", "foreign abort"])
@pytest.mark.parametrize("raised", [False, True])
def test_a_fork_that_outlives_its_capture_says_so(strategy: str, ends: str, raised: bool) -> None:
    """A typed error, added to that of the body; the lease around it is released, and what comes next is served."""
    device, ws = scene(strategy, steady=True, reserve=4 * SLAB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main):
        lease = ws.acquire(BYTES, N=SLAB)
        own = ws.capture()
        if ends == "end":
            own.__enter__()
        else:
            device.begin_capture(main.key)
        fork = ws.fork(aux)
        fork.__enter__()
        {
            "end": lambda: own.__exit__(None, None, None),
            "foreign end": lambda: device.end_capture(main.key),
            "foreign abort": lambda: device.abort_capture(main.key),
        }[ends]()
        if raised:
            error = KeyError("body")
            assert not fork.__exit__(KeyError, error, None)
            assert "after the capture has ended" in error.__notes__[0]
        else:
            with pytest.raises(CaptureError, match="after the capture has ended"):
                fork.__exit__(None, None, None)
        assert list(ws.timeline.state.held) == [lease]
        lease.release()
    write(device, ws, "next", SLAB, aux)
    assert not ws.timeline.state.held and device.verdict() == "SAFE"


@pytest.mark.parametrize(("taken", "refused"), [("parent", True), ("branch", True), ("parent", False)])
def test_a_fork_whose_stream_another_thread_captures_breaks_no_capture(
    taken: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The join is refused by name, the branch stays declared, and the capture goes on. The control breaks it."""
    if not refused:
        monkeypatch.setattr(Fork, "_refuse_taken", lambda fork, stream: None)
    device, ws = scene("event_fenced", steady=True, reserve=4 * SLAB)
    streams = {"parent": ws.stream("parent"), "branch": ws.stream("branch")}
    go, left = threading.Event(), threading.Event()
    found: list[object] = []

    def capturing() -> None:
        with torch.no_grad(), ws.on(ws.stream("other")):
            try:
                with ws.capture() as capture, ws.fork(streams[taken]):
                    go.set()
                    left.wait(10)
                capture.graph.replay()
                found.append("replayed")
            except CaptureError as error:
                found.append(error)
                go.set()

    with ws.on(streams["parent"]):
        lease = ws.acquire(BYTES, N=SLAB)
        fork = ws.fork(streams["branch"])
        fork.__enter__()
        thread = threading.Thread(target=capturing)
        thread.start()
        assert go.wait(10)
        expected = pytest.raises(CaptureError, match="has become part of a capture")
        with expected if refused else suppress(CaptureError):
            fork.__exit__(None, None, None)
        left.set()
        thread.join()
        assert (found == ["replayed"]) == refused
        lease.release()
    write(device, ws, "next", SLAB, ws.stream("third"))
    assert not ws.timeline.state.held and device.verdict() == "SAFE"
