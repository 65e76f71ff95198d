"""Captures that fail, at every point: what they took is given back, and the lane serves on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workspace.bookkeeping import check_books, check_coalesced
from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, scene, write
from tests.workspace.test_capture import captured
from workspace import Workspace
from workspace.capturing import GraphCapture
from workspace.errors import CaptureError, GraphError
from workspace.simulated import Device

BLOCKS = ["event_fenced", "per_stream"]


class Failure(Exception):
    pass


def fails_before_any_lease(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    raise Failure


def fails_with_a_lease_held(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    ws.acquire(BYTES, N=4096)
    raise Failure


def fails_after_a_lease(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    with ws.lease(BYTES, N=4096), ws.lease(OTHER, N=100_000):
        pass
    raise Failure


def fails_in_an_eager_break(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    with ws.lease(BYTES, N=4096):

        def fail() -> None:
            with ws.lease(OTHER, N=4096):
                raise Failure

        capture.eager_break(fail)


def fails_after_an_eager_break(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    with ws.lease(BYTES, N=4096):
        capture.eager_break(lambda: None)
    with ws.lease(BYTES, N=8192):
        raise Failure


def fails_in_a_nested_fork(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    one, two = ws.stream("one"), ws.stream("two")
    with ws.fork(one) as branch, branch(one), ws.fork(two) as inner, inner(two), ws.lease(BYTES, N=4096):
        raise Failure


def breaks_in_a_branch(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    one = ws.stream("one")
    with ws.fork(one) as branch, branch(one), ws.lease(BYTES, N=4096):
        device.synchronize()


def ends_unjoined(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    event = ws.event()
    event.record()
    event.wait(ws.stream("one"))
    with ws.on(ws.stream("one")), ws.lease(BYTES, N=4096) as lease:
        device.launch("stray", writes=[lease.x])


def breaks_unjoined(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    ends_unjoined(device, ws, capture)
    capture.eager_break(lambda: None)


def ends_with_a_lease_held(device: Device, ws: Workspace, capture: GraphCapture) -> None:
    ws.acquire(BYTES, N=4096)


FAILURES: list[Callable[[Device, Workspace, GraphCapture], None]] = [
    fails_before_any_lease, fails_with_a_lease_held, fails_after_a_lease, fails_in_an_eager_break,
    fails_after_an_eager_break, fails_in_a_nested_fork, breaks_in_a_branch, ends_unjoined, breaks_unjoined,
    ends_with_a_lease_held,
]  # fmt: skip


def state(ws: Workspace) -> dict[str, Any]:
    """Everything a failed capture could leave behind."""
    timeline = ws.timeline
    snapshot = ws.snapshot()
    return {
        "held": list(timeline.state.held),
        "captures": dict(timeline.captures),
        "busy": timeline.busy,
        "deferred": list(timeline.deferred),
        "graphs": ws.graphs,
        "streams": set(timeline.clocks.of),
        "allocated": snapshot.allocated,
        "footprints": snapshot.footprints,
        "slabs": snapshot.slabs,
        "owners": {name: owner.allocated for name, owner in snapshot.owners.items() if owner.allocated},
        "current": ws.driver.current_stream(),
    }


@pytest.mark.parametrize("strategy", ["caching", *BLOCKS])
@pytest.mark.parametrize("fail", FAILURES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("lane_lives", [False, True])
def test_a_failed_capture_leaves_nothing_behind(
    strategy: str, fail: Callable[[Device, Workspace, GraphCapture], None], lane_lives: bool
) -> None:
    """All is as before, the lane's other graph replays, and a new one can be captured."""
    device, ws = scene(strategy, reserve=MIB, statistics=True, limit=4 * MIB)
    main = ws.stream("main")
    ws.stream("one"), ws.stream("two")
    graph = captured(device, ws, main) if lane_lives and strategy != "caching" else None
    with ws.on(main):
        kept = ws.acquire(OTHER, N=512)
        device.launch("kept", writes=[kept.y])
        before = state(ws)
        with pytest.raises((Failure, CaptureError)):
            with ws.capture() as capture:
                fail(device, ws, capture)
        assert state(ws) == before
        kept.release()
    with pytest.raises(GraphError):
        capture.graph.replay(main)
    if graph is not None:
        graph.replay(main)
        graph.release()
    if strategy != "caching":
        captured(device, ws, main).replay(main)
        check_coalesced(ws)
    assert ws.snapshot().allocated == 0 and device.verdict() == "SAFE"


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_failed_captures_bytes_keep_their_uses(strategy: str) -> None:
    """What the footprint took over from eager leases comes back with it, and an eager break's use too."""
    device, ws = scene(strategy, reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    write(device, ws, "eager", SLAB, other)
    with pytest.raises(Failure), ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=SLAB) as lease:
        capture.eager_break(lambda: device.launch("break", writes=[lease.x]))
        raise Failure
    write(device, ws, "next", SLAB, ws.stream("third"))
    assert device.verdict() == "SAFE" and len(ws.snapshot().slabs) == 1


def test_a_capture_that_the_device_refuses_to_begin_leaves_nothing_behind() -> None:
    """The default stream cannot be captured."""
    _, ws = scene(reserve=MIB)
    kept = ws.acquire(BYTES, N=100)
    before = state(ws)
    with pytest.raises(CaptureError, match="default stream"), ws.capture():
        pass
    assert state(ws) == before
    kept.release()


def test_a_failed_capture_does_not_disturb_another_one_of_its_lane() -> None:
    """Two captures at once, the younger claims and lives, the older fails: its footprint stays whole."""
    device, ws = scene(reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    young = ws.capture()
    with pytest.raises(Failure), ws.on(main), ws.capture():
        with ws.lease(BYTES, N=1024) as lease:
            device.launch("old", writes=[lease.x])
        with ws.on(other):
            young.__enter__()
            with ws.lease(BYTES, N=8192) as lease:
                device.launch("young", writes=[lease.x])
        raise Failure
    with ws.on(other):
        young.__exit__(None, None, None)
    assert young.graph.footprint >= 8192
    young.graph.replay(other)
    write(device, ws, "eager", SLAB - 16384, main)
    assert device.verdict() == "SAFE"
    young.graph.release()
    check_books(ws)
    assert ws.snapshot().footprints == {}
