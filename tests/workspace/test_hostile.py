"""Programs a hostile review found: each was unsafe, or lost bytes, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workspace
from workspace import simulated
from workspace.errors import CapacityError, CaptureError, FootprintBusy, ForkError, LockError

MIB = 1 << 20
BLOCK = workspace.Layout("block", x=workspace.spec("N", dtype=torch.uint8))


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.inference_mode():
        yield


def made(strategy: str = "event_fenced", **settings: Any) -> tuple[simulated.Device, Any]:
    device = simulated.Device(memory="virtual")
    return device, workspace.create(strategy, device=device, **settings)


def test_an_event_of_an_earlier_use_does_not_stand_for_a_later_one() -> None:
    """A replay's event on a communication stream covers the replay only."""
    device, ws = made()
    s, t, comm = ws.stream("s"), ws.stream("t"), ws.stream("comm", communication=True)
    ws.declare(BLOCK, N=4 * MIB)
    ws.reserve()
    lease = ws.acquire(BLOCK, N=MIB, stream=comm)
    with ws.on(s), ws.capture() as capture:
        device.launch("captured", reads=[lease.x])
    capture.graph.replay(comm)
    capture.graph.release()
    with ws.on(comm):
        device.launch("late", writes=[lease.x])
    lease.release()
    with ws.on(t), ws.lease(BLOCK, N=4 * MIB) as other:
        device.launch("write", writes=[other.x])
    assert device.verdict() == "SAFE"


def test_what_a_capture_takes_over_during_a_break_keeps_its_uses() -> None:
    """A break that captures another graph of the lane takes bytes from the pool whose last use is elsewhere."""
    device, ws = made()
    s, t, aux = ws.stream("s"), ws.stream("t"), ws.stream("aux")
    ws.declare(BLOCK, N=4 * MIB)
    ws.reserve()
    graphs = []
    with ws.on(aux), ws.lease(BLOCK, N=4 * MIB) as lease:
        device.launch("aux", writes=[lease.x])

    def capture_another() -> None:
        if not graphs:
            with ws.on(t), ws.capture() as inner, ws.lease(BLOCK, N=MIB) as lease:
                device.launch("inner", writes=[lease.x])
            graphs.append(inner.graph)

    with ws.on(s), ws.capture() as outer:
        outer.eager_break(capture_another)
    graphs[0].replay(s)
    assert device.verdict() == "SAFE"


def test_poison_leaves_a_footprint_alone_between_segments() -> None:
    """The fill of a lease whose capture failed between two segments would land on another graph's bytes."""
    device, ws = made(poison=True)
    s, t = ws.stream("s"), ws.stream("t")
    ws.declare(BLOCK, N=4 * MIB)
    ws.reserve()

    def fail_to_capture() -> None:
        with (
            pytest.raises(FootprintBusy),
            ws.on(t),
            ws.capture() as inner,
            ws.lease(BLOCK, N=MIB),
        ):
            inner.eager_break(lambda: None)

    with ws.on(s), ws.capture() as outer, ws.lease(BLOCK, N=MIB) as lease:
        outer.eager_break(lambda: (device.launch("outer", writes=[lease.x]), fail_to_capture()))
    assert device.verdict() == "SAFE"


def test_a_synchronisation_claims_no_stream_that_began_to_capture() -> None:
    """A foreign capture that is open on the device, and not yet known to the library, is left out by the driver."""
    device, ws = made()
    m, t = ws.stream("m"), ws.stream("t")
    with ws.on(m), ws.lease(BLOCK, N=2 * MIB) as lease:
        device.launch("write", writes=[lease.x])
    device._watchers.insert(0, (lambda key: None, lambda key, capture: ws.synchronize(), lambda *ended: None))
    with ws.on(m):
        device.begin_capture(m.key, "relaxed")
    with ws.on(t), ws.lease(BLOCK, N=2 * MIB) as lease:
        device.launch("write too", writes=[lease.x])
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize("capturing", [False, True])
def test_a_synchronisation_passes_over_streams_that_are_gone(capturing: bool) -> None:
    """A raw stream that was destroyed is among those seen; while a capture is open each of them is asked for."""
    device, ws = made()
    raw, main = device.new_raw_stream("raw"), ws.stream("main")
    with ws.on(raw), ws.lease(BLOCK, N=MIB) as lease:
        device.launch("write", writes=[lease.x])
    device.destroy_stream(raw)
    if capturing:
        with ws.on(main), ws.capture():
            with ws.on(ws.stream("other")):
                ws.synchronize()
    else:
        ws.synchronize()
    with ws.on(main), ws.lease(BLOCK, N=MIB) as lease:
        device.launch("write too", writes=[lease.x])
    assert device.verdict() == "SAFE"


class Work:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1
        if self.fails:
            raise RuntimeError("the collective failed")


def test_every_collective_is_waited_for_when_one_fails() -> None:
    """The lease stays held until the failed one is waited for without an error."""
    _, ws = made()
    failing, good = Work(True), Work(False)
    lease = ws.acquire(BLOCK, N=MIB)
    lease.until(failing)
    lease.until(good)
    with pytest.raises(RuntimeError, match="collective failed"):
        lease.release()
    assert (good.waited, lease.released) == (1, False)
    failing.fails = False
    lease.release()
    assert (failing.waited, good.waited, ws.snapshot().allocated) == (2, 1, 0)


def test_captures_and_forks_are_entered_once() -> None:
    """Their books are those of one entry."""
    _, ws = made()
    main, side = ws.stream("main"), ws.stream("side")
    capture, fork = ws.capture(), ws.fork(side)
    with ws.on(main):
        with capture:
            pass
        with pytest.raises(CaptureError, match="twice"), capture:
            pass
        with fork, pytest.raises(ForkError, match="twice"), fork:
            pass


def test_a_stream_made_current_twice_gives_the_first_one_back() -> None:
    """``ws.on`` nests with itself."""
    _, ws = made()
    on = ws.on(ws.stream("side"))
    with on, on:
        pass
    assert ws.driver.current_stream() == 0


def test_persistent_buffers_wait_for_the_device() -> None:
    """Their uses are declared to nobody, so only an idle device proves them over."""
    device, ws = made()
    t = ws.stream("t")
    buffer = ws.persistent("counters", (MIB,), torch.uint8)
    with ws.on(t):
        device.launch("count", writes=[buffer])
    del buffer
    ws.close()
    again = device.empty((MIB,), torch.uint8)
    device.launch("write", writes=[again])
    assert device.verdict() == "SAFE"


def test_a_slot_of_before_a_capture_may_be_filled_inside() -> None:
    """Its tensor belongs to the graph as well, and its home is the stream outside."""
    _, ws = made("caching")
    s = ws.stream("s")
    with ws.lease(BLOCK, N=64) as lease:
        with ws.on(s), ws.capture() as capture:
            lease.x.tensor()
    capture.graph.release()
    assert ws.snapshot().allocated == 0


def test_growth_that_fails_ends_in_a_fence() -> None:
    """Also when growing gave up the slab that a fence would have been for."""
    device = simulated.Device(memory="virtual", capacity=24 * MIB)
    ws = workspace.create("event_fenced", device=device, policy="grow,fence", micro_batches=2)
    aux = ws.stream("aux")
    ws.declare(BLOCK, N=8 * MIB)
    ws.reserve()
    with ws.lease(BLOCK, N=16 * MIB) as lease:
        device.launch("write", writes=[lease.x])
    with ws.on(aux):
        try:
            with ws.lease(BLOCK, N=16 * MIB) as lease:
                device.launch("write too", writes=[lease.x])
        except CapacityError:
            pass
    assert (device.verdict(), ws.snapshot().allocated) == ("SAFE", 0)


def test_a_refused_reservation_keeps_what_was_reserved() -> None:
    """The capacity is looked at before anything is given up."""
    _, ws = made(capacity=4 * MIB)
    ws.declare(BLOCK, N=3 * MIB)
    ws.reserve()
    before = ws.snapshot().reserved
    ws.declare(BLOCK, N=3 * MIB, phase="another", count=2)
    with pytest.raises(CapacityError):
        ws.reserve()
    assert ws.snapshot().reserved == before


def test_per_stream_gives_what_was_reserved_whatever_streams_had_parts_of_it() -> None:
    """A slab that homes have divided is one block again when nothing of it is leased."""
    device, ws = made("per_stream")
    main, aux = ws.stream("main"), ws.stream("aux")
    ws.declare(BLOCK, N=4 * MIB)
    ws.reserve()
    ws.lock()
    with ws.on(aux), ws.lease(BLOCK, N=MIB) as lease:
        device.launch("write", writes=[lease.x])
    with ws.on(main), ws.lease(BLOCK, N=4 * MIB) as lease:
        device.launch("write too", writes=[lease.x])
    assert device.verdict() == "SAFE"


def test_a_refused_close_closes_nobody() -> None:
    """Owners with strategies of their own are looked at first."""
    _, ws = made(owners={"draft": "per_stream"})
    draft = ws.owner("draft")
    lease = ws.acquire(BLOCK, N=MIB)
    with pytest.raises(LockError):
        ws.close()
    with draft.lease(BLOCK, N=MIB):
        pass
    lease.release()
    ws.lock()
    ws.close()
