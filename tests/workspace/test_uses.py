"""Declared uses: by lease, tensor or fork, of collectives, of every stream seen, and too late."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, MIB, SLAB, host, scene, write
from workspace import Layout, Workspace, spec
from workspace.errors import CapacityError, CaptureError, DriverError, LateUse, LockError, WorkspaceError
from workspace.lazy import LazyLease
from workspace.lease import Lease
from workspace.simulated import Device

PAIR = Layout("pair", q=spec("T", 4, dtype=torch.float32), idx=spec("T", dtype=torch.int32))
SAFE = ["caching", "event_fenced", "per_stream"]
BLOCKS = ["event_fenced", "per_stream"]


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("declared", [True, False])
def test_a_declared_use_is_ordered(strategy: str, declared: bool) -> None:
    """The next owner waits for the reader; without the declaration it does not, and the judge says so."""
    device, ws = scene(strategy)
    aux = ws.stream("aux")
    lease = ws.acquire(BYTES, N=SLAB)
    tensor = lease.x.tensor() if strategy == "caching" else lease.x
    device.launch("fill", writes=[tensor])
    ready = ws.event()
    ready.record()
    ready.wait(aux)
    device.launch("read", reads=[tensor], stream=aux.key)
    if declared:
        lease.use(aux)
    lease.release()
    del tensor
    gc.collect()
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("overwrite", writes=[lease.x])
    assert device.verdict() == ("SAFE" if declared else "UNSAFE")


def test_a_use_by_hand_outlasts_a_fork() -> None:
    """A join ends the branch's use, not the one the user declared for the same stream."""
    for acquirer in ("main", "other"):
        device, ws = scene()
        aux, other = ws.stream("aux"), ws.stream("other")
        lease = ws.acquire(BYTES, stream=other if acquirer == "other" else 0, N=SLAB)
        ws.use(lease, aux)
        with ws.fork(aux):
            pass
        device.launch("late read", reads=[lease.x], stream=aux.key)
        lease.release()
        with ws.on(lease.stream), ws.lease(BYTES, N=SLAB) as lease:
            device.launch("write", writes=[lease.x])
        assert device.verdict() == "SAFE", acquirer


def test_a_late_use_is_refused() -> None:
    """After the release others may own the bytes: by lease and by tensor."""
    _, ws = scene()
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=100) as lease:
        tensor = lease.x
    with pytest.raises(LateUse, match="after its release"):
        lease.use(aux)
    with pytest.raises(LateUse, match=r"of VirtualTensor \(100,\) torch.uint8 at 0x[0-9a-f]+ is declared, and no"):
        ws.use(tensor, aux)
    with pytest.raises(LateUse, match="before the release"):
        ws.until(ws.event())


@pytest.mark.parametrize("strategy", SAFE)
def test_a_use_is_declared_by_lease_tensor_or_view(strategy: str) -> None:
    """Whatever lies in the lease's bytes names the lease."""
    _, ws = host(strategy)
    aux = ws.stream("aux")
    with ws.lease(PAIR, T=4) as lease:
        whole = lease.q.tensor() if strategy == "caching" else lease.q
        for one in (lease, lease.q, whole[1:], whole.view(16)):
            ws.use(one, aux)


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("place", [scene, host])
def test_an_empty_tensor_may_be_declared_used(place: Callable[..., tuple[Device, Workspace]], strategy: str) -> None:
    """It has no bytes that anybody could overwrite, and model code does not test for it."""
    _, ws = place(strategy)
    with ws.lease(PAIR, T=0) as lease:
        ws.use(lease.q, ws.stream("aux"))


def test_declared_uses_across_a_capture_are_refused() -> None:
    """An eager lease is not used in a capture it was not held for, nor a captured one outside."""
    _, ws = scene(reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main):
        with ws.capture():
            with ws.lease(BYTES, N=100) as inside, pytest.raises(CaptureError, match="is used on"):
                inside.use(aux)
            with ws.on(aux):
                outside = ws.acquire(BYTES, N=100)
            with pytest.raises(CaptureError, match="lease it before the capture begins, or inside it"):
                outside.use(main)
    outside.release()


class Work:
    """A collective's handle: what follows ``wait`` on a stream comes after it."""

    def __init__(self, device: Device, ws: Workspace, tensor: Any) -> None:
        self._device = device
        self._done = ws.event()
        with ws.on(ws.stream("nccl", communication=True)):
            device.launch("reduce", writes=[tensor])
            self._done.record()

    def wait(self) -> None:
        self._done.wait()


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("waited", [True, False])
def test_a_lease_outlives_its_collective(strategy: str, waited: bool) -> None:
    """``ws.until(work)`` releases only after ``work.wait()`` on the acquiring stream (pytorch#148590)."""
    device, ws = scene(strategy)
    nccl = ws.stream("nccl", communication=True)
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("fill", writes=[lease.x])
        ready = ws.event()
        ready.record()
        ready.wait(nccl)
        work = Work(device, ws, lease.x)
        if waited:
            ws.until(work)
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("next", writes=[lease.x])
    assert device.verdict() == ("SAFE" if waited else "UNSAFE")


@pytest.mark.parametrize("strict", [True, False])
def test_strict_streams_count_every_stream_seen(strict: bool) -> None:
    """The setting orders the next owner after streams nobody declared."""
    device, ws = scene(strict_streams=strict)
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("undeclared", writes=[lease.x], stream=aux.key)
    write(device, ws, "next", SLAB, 0)
    assert device.verdict() == ("SAFE" if strict else "UNSAFE")


def test_strict_streams_count_for_single_tensors() -> None:
    """They are scratch as any other."""
    device, ws = scene(strict_streams=True)
    tensor = ws.empty((SLAB,), torch.uint8)
    device.launch("undeclared", writes=[tensor], stream=ws.stream("aux").key)
    del tensor
    gc.collect()
    write(device, ws, "next", SLAB, 0)
    assert device.verdict() == "SAFE"


def test_strict_streams_count_inside_a_capture() -> None:
    """Every stream of the capture is a user of its leases."""
    device, ws = scene(strict_streams=True, reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture, ws.fork(aux) as branch:
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("write", writes=[lease.x])
            ready = ws.event()
            ready.record()
            ready.wait(aux)
            with branch(aux):
                device.launch("undeclared", reads=[lease.x])
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("next", writes=[lease.x])
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"


class Collective:
    """As a process group's work: what is enqueued after `wait` comes after the collective."""

    def __init__(self, device: Device, tensor: Any, on: Any, stream: Any) -> None:
        self._device = device
        self._event = device.new_event()
        device.record(self._event, stream.key)
        device.wait(self._event, on.key)
        device.launch("all_reduce", writes=[tensor], stream=on.key)
        device.record(self._event, on.key)

    def wait(self) -> None:
        self._device.wait(self._event, self._device.driver().current_stream())


def reduced(ws: Workspace, device: Device, lease: Any) -> Any:
    """Give a lease's tensor to a collective, to be waited for at the release; returns the tensor."""
    tensor = whole(lease.x)
    device.launch("fill", writes=[tensor])
    lease.until(Collective(device, tensor, ws.stream("network", communication=True), lease.stream))
    return tensor


def in_flight(strategy: str) -> tuple[Device, Workspace, Any]:
    """A lease of a stream of its own that a collective uses, on a workspace with room for a capture."""
    device, ws = scene(strategy)
    ws.declare(BYTES, N=SLAB, lane="main")
    ws.reserve()
    with ws.on(ws.stream("one")):
        lease = ws.acquire(BYTES, N=64)
        reduced(ws, device, lease)
    return device, ws, lease


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("refused", [True, False])
def test_a_collective_is_not_waited_for_in_a_capture(
    monkeypatch: pytest.MonkeyPatch, strategy: str, refused: bool
) -> None:
    """The wait would cross its border: the lease stays held, and the capture whole. Control: waited for, it breaks."""
    if not refused:
        monkeypatch.setattr(Lease, "_captured_since", lambda lease: False)
    device, ws, lease = in_flight(strategy)
    with ws.on(lease.stream):
        if not refused:
            with pytest.raises(WorkspaceError), ws.capture():
                lease.release()
            return
        with ws.capture() as capture:
            with pytest.raises(CaptureError, match="before the capture, or after it"):
                lease.release()
            still: list[bool] = [lease.released]
            with ws.lease(BYTES, N=64) as inside:
                device.launch("inside", writes=[whole(inside.x)])
        capture.graph.replay()
        lease.release()
        with ws.lease(BYTES, N=64) as after:
            device.launch("after", writes=[whole(after.x)])
    assert still == [False] and lease.released and device.verdict() == "SAFE"


@pytest.mark.parametrize("strategy", SAFE)
def test_a_finaliser_leaves_the_wait_until_the_capture_has_ended(strategy: str) -> None:
    """Nobody is there to be refused."""
    device, ws, lease = in_flight(strategy)
    with ws.on(lease.stream):
        with ws.capture():
            with ws.timeline.lock:  # as in the middle of an acquire of this thread
                lease.release()
            with ws.lease(BYTES, N=64) as inside:
                device.launch("inside", writes=[whole(inside.x)])
        with ws.lease(BYTES, N=64) as after:
            device.launch("after", writes=[whole(after.x)])
    assert lease.released and device.verdict() == "SAFE" and not ws.timeline.deferred


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("stamped", [True, False])
def test_the_wait_that_a_finaliser_leaves_is_the_last_use(
    monkeypatch: pytest.MonkeyPatch, strategy: str, captured: bool, stamped: bool
) -> None:
    """It comes later than the release; what is ordered after that only may not have the bytes. Control: it is waited
    for, and the release stays the last use."""
    replayed = Lease.replayed
    if not stamped and captured:
        monkeypatch.setattr(Lease, "replayed", lambda lease, *use: lease.replays or replayed(lease, *use))
    elif not stamped:
        monkeypatch.setattr(Lease, "_settle_works", lambda lease, _, works: lease.workspace.await_works(lease, works))
    device, ws = scene(strategy)
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(one):
        lease = ws.acquire(BYTES, N=SLAB)
        reduced(ws, device, lease)
        with ws.capture() if captured else nullcontext():
            with ws.timeline.lock:
                lease.release()
            if captured:
                ws.timeline.drain()  # as the next acquire does
        with ws.fork(two) as branch, branch(two), ws.lease(BYTES, N=SLAB) as after:
            device.launch("after", writes=[after.x])
    assert device.verdict() == ("SAFE" if stamped else "UNSAFE")


class Failing:
    """A collective whose first waits fail."""

    def __init__(self, times: int) -> None:
        self.left = times

    def wait(self) -> None:
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("a rank is gone")


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_late_wait_that_fails_keeps_its_bytes_alone(strategy: str, captured: bool, times: int) -> None:
    """It is said once and tried again where bytes are looked at; what another finaliser has left is done, too."""
    _, ws = scene(strategy)
    ws.declare(BYTES, N=SLAB, lane="main")
    ws.reserve()
    works, raised = [Failing(times), Failing(0)], list[str]()
    with ws.on(ws.stream("one")):
        leases = [ws.acquire(BYTES, N=64) for _ in works]
        for lease, work in zip(leases, works, strict=True):
            lease.until(work)
        with ws.capture() if captured else nullcontext():
            with ws.timeline.lock:
                for lease in leases:
                    lease.release()
        for _ in range(2):
            try:
                with ws.lease(BYTES, N=16):
                    pass
            except RuntimeError as error:
                raised.append(str(error))
    assert raised == ["a rank is gone"] * (times > 0)
    assert works[1].left == -1 and works[0].left == (-1 if times == 0 else times - 1)
    assert not ws.timeline.busy and not ws.timeline.deferred
    for left in range(times - 2, -3, -1):  # a snapshot looks
        assert ws.snapshot().allocated == (256 if left >= 0 else 0)
        assert works[0].left == max(left, -1)
    assert not ws.timeline.unwaited


@pytest.mark.parametrize("strategy", SAFE)
def test_a_collective_that_is_gone_for_good_keeps_no_workspace_open(strategy: str) -> None:
    """What it did is over once the device is idle."""
    _, ws = scene(strategy)
    other = workspace.create(strategy, device=ws.device)
    for one in (ws, other):
        lease = one.acquire(BYTES, N=64)
        lease.until(Failing(10**6))
        with ws.timeline.lock:
            lease.release()
        with pytest.raises(RuntimeError, match="a rank is gone"):
            one.acquire(BYTES, N=64)
    ws.close()
    assert len(ws.timeline.unwaited) == 1
    other.close()
    assert not ws.timeline.unwaited and not ws.timeline.busy


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("times", [None, 0, 1])
@pytest.mark.parametrize("ended", [True, False])
def test_a_collective_of_a_captured_lease_is_waited_for_once(strategy: str, times: int | None, ended: bool) -> None:
    """Also after the capture has ended, where the streams of it are no more; the steady path is taken again."""
    _, ws = scene(strategy)
    ws.declare(BYTES, N=SLAB, lane="main")
    ws.reserve()
    work = Failing(times or 0)
    expected = pytest.raises(RuntimeError, match="a rank is gone") if times else nullcontext()
    with ws.on(ws.stream("one")):
        with ws.capture():
            lease = ws.acquire(BYTES, N=64)
            if times is not None:
                lease.until(work)
            with ws.timeline.lock:
                lease.release()
            if not ended:
                with expected:
                    ws.acquire(BYTES, N=16).release()
        if ended:
            with expected:
                ws.acquire(BYTES, N=16).release()
        for _ in range(2):
            ws.acquire(BYTES, N=16).release()
    assert work.left == (-1 if times == 0 else 0)
    assert ws.snapshot().allocated == 0
    assert not ws.timeline.busy and not ws.timeline.unwaited and not ws.timeline.deferred


def unwaited(ws: Workspace, times: int) -> Failing:
    """The work of a lease of a slab that a finaliser has released; a wait for it has failed, and was said to."""
    work = Failing(times)
    lease = ws.acquire(BYTES, N=SLAB)
    lease.until(work)
    with ws.timeline.lock:
        lease.release()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        ws.acquire(BYTES, N=SLAB)
    return work


@pytest.mark.parametrize("strategy", BLOCKS)
def test_bytes_that_are_needed_are_waited_for_again(strategy: str) -> None:
    """In the acquire that finds no others."""
    _, ws = scene(strategy, reserve=SLAB)
    ws.lock()
    work = unwaited(ws, 2)
    with pytest.raises(CapacityError):
        ws.acquire(BYTES, N=SLAB)
    with ws.lease(BYTES, N=SLAB):
        assert work.left == -1 and not ws.timeline.unwaited


@pytest.mark.parametrize("strategy", BLOCKS)
def test_while_a_capture_is_open_the_device_is_not_known_to_be_idle(strategy: str) -> None:
    """Another workspace's: a collective that cannot be waited for then keeps its bytes."""
    _, ws = scene(strategy)
    other = workspace.create(strategy, device=ws.device)
    work = unwaited(ws, 2)
    with ws.on(ws.stream("one")), other.capture():
        with pytest.raises(LockError, match="bytes are on lease"):
            ws.close()
        assert work.left == 1
    ws.close()
    assert work.left == -1 and not ws.timeline.unwaited


def test_what_is_over_and_could_not_be_stamped_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait has succeeded, and the device refused the event of a stream that may be gone."""
    device, ws = scene(reserve=SLAB)
    ws.lock()
    with ws.on(ws.stream("network", communication=True)):
        work = unwaited(ws, 1)
    with monkeypatch.context() as broken:
        broken.setattr(ws.driver, "record", lambda *_: _raise(DriverError("out of order")))
        assert ws.snapshot().allocated == SLAB
    assert work.left == -1 and ws.snapshot().allocated == 0
    write(device, ws, "next", SLAB, ws.stream("other"))
    assert device.verdict() == "SAFE"


def test_a_late_wait_stays_out_of_a_capture_nobody_told_of() -> None:
    """Where each acquire has to ask for those, nothing else shows that one is open."""
    device, ws = scene(reserve=SLAB, foreign_captures="query")
    stream = ws.stream("one")
    with ws.on(stream):
        work = unwaited(ws, 2)
        device._watchers.clear()
        device.begin_capture(stream.key)
        ws.snapshot()
        assert work.left == 1 and len(ws.timeline.unwaited) == 1
        device.end_capture(stream.key)
        ws.snapshot()
    assert work.left == 0 and ws.snapshot().allocated == 0


@pytest.mark.parametrize("strategy", SAFE)
def test_a_lease_of_two_streams_may_end_after_its_capture(strategy: str) -> None:
    """By a finaliser: the streams' selves in there are forgotten."""
    _, ws = scene(strategy)
    ws.declare(BYTES, N=SLAB, lane="main")
    ws.reserve()
    aux = ws.stream("aux")
    with ws.on(ws.stream("one")):
        with ws.capture(), ws.fork(aux):
            lease = ws.acquire(BYTES, N=64)
            lease.allocate("x")
            with ws.fork(aux), ws.timeline.lock:
                lease.release()
        with ws.lease(BYTES, N=64):
            pass
    assert ws.snapshot().allocated == 0


def test_an_interrupt_is_not_lost_among_errors() -> None:
    """Of several steps that fail, the one that is no error of the program arrives."""
    _, ws = scene()
    with ws.timeline.lock:
        for raised in (RuntimeError, KeyboardInterrupt, ValueError):
            ws.timeline.later(partial(_raise, raised))
    with pytest.raises(KeyboardInterrupt):
        ws.acquire(BYTES, N=16)
    ws.acquire(BYTES, N=16).release()


def _raise(kind: type[BaseException] | BaseException) -> None:
    raise kind


def whole(tensor: Any) -> Any:
    return tensor.tensor() if hasattr(tensor, "tensor") else tensor


@pytest.mark.parametrize("kept", [True, False])
def test_what_a_collective_reads_outlives_its_place_in_a_slot(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Filled anew before the release waits for the collective. Control: given back as it is replaced."""
    if not kept:
        replaced = LazyLease._replace

        def forgetful(lease: LazyLease, position: int) -> None:
            works, lease._works = lease._works, None
            replaced(lease, position)
            lease._works = works

        monkeypatch.setattr(LazyLease, "_replace", forgetful)
    device, ws = scene("caching")
    one = ws.stream("one")

    def made() -> Any:
        return ws.driver.empty((64,), torch.uint8, one.key)

    with ws.on(one), ws.lease(BYTES, N=64) as lease:
        slot = lease.x
        slot.fill(made())
        reduced(ws, device, lease)
        slot.fill(made())
        gc.collect()
        device.launch("somebody else", writes=[made()])
    assert device.verdict() == ("SAFE" if kept else "UNSAFE")
