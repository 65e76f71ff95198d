"""Captures and full graphs: footprints, replays, releases, and captures that fail at every point."""

from __future__ import annotations

import gc
from functools import partial

import pytest

from tests.workspace.bookkeeping import check_books
from tests.workspace.scene import BYTES, MIB, SLAB, host, scene, write
from workspace import Workspace
from workspace.errors import CaptureError, GraphError, LeaseReleased, LockError
from workspace.graph import Graph
from workspace.lane import Lane
from workspace.simulated import Device
from workspace.streams import Stream

BLOCKS = ["event_fenced", "per_stream"]


def captured(device: Device, ws: Workspace, stream: Stream, nbytes: int = 4096, lane: str = "main") -> Graph:
    """A graph that writes and reads one lease."""
    with ws.on(stream), ws.capture(lane) as capture, ws.lease(BYTES, N=nbytes) as lease:
        device.launch("captured write", writes=[lease.x])
        device.launch("captured read", reads=[lease.x])
    return capture.graph


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("lets_go", [False, True])
def test_a_footprint_belongs_to_its_graph(monkeypatch: pytest.MonkeyPatch, strategy: str, lets_go: bool) -> None:
    """Nobody else gets its bytes while the graph exists; handed out after the capture, they would race."""
    if lets_go:
        monkeypatch.setattr(Lane, "in_use", property(lambda lane: lane.captures > 0))
    device, ws = scene(strategy, reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    graph = captured(device, ws, main)
    with ws.on(other), ws.lease(BYTES, N=SLAB - 4096) as rest, ws.lease(BYTES, N=4096) as lease:
        graph.replay(main)
        device.launch("eager", writes=[lease.x, rest.x])
    assert device.verdict() == ("UNSAFE" if lets_go else "SAFE")


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_released_graphs_bytes_wait_for_its_last_replay(strategy: str) -> None:
    """They return to the pool at once, and the next owner on another stream is fenced."""
    device, ws = scene(strategy, reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    graph = captured(device, ws, main, SLAB)
    graph.replay(main)
    graph.release()
    graph.release()
    assert ws.snapshot().footprints == {} and graph.released
    check_books(ws)
    write(device, ws, "next", SLAB, other)
    assert device.verdict() == "SAFE" and len(ws.snapshot().slabs) == 1 and ws.snapshot().fences == 1


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_replay_comes_after_earlier_uses_and_before_later_ones(strategy: str) -> None:
    """The bytes' uses of before the capture, replays on several streams, and what comes after the release."""
    device, ws = scene(strategy, reserve=SLAB)
    streams = [ws.stream(name) for name in "abc"]
    write(device, ws, "before", SLAB, streams[2])
    ws.synchronize()
    write(device, ws, "before", SLAB, streams[1])
    graph = captured(device, ws, streams[0], SLAB)
    for stream in (*streams, *reversed(streams)):
        graph.replay(stream)
    graph.release()
    write(device, ws, "after", SLAB, streams[1])
    assert device.verdict() == "SAFE"


def test_a_replay_after_replays_on_one_stream_makes_no_device_call() -> None:
    """The launch is the only one: nothing is recorded or waited for while one stream replays."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    graph = captured(device, ws, main)
    graph.replay(main)
    before = device.counters.copy()
    graph.replay(main)
    assert device.counters - before == {"graph_launch": 1}


def test_the_current_stream_is_the_default_of_a_replay() -> None:
    """Omitted means current; None is refused."""
    device, ws = scene(reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    graph = captured(device, ws, main)
    with ws.on(other):
        graph.replay()
    assert graph.pins is not None and list(graph.pins.lanes[0].uses) == [other.id]
    with pytest.raises(ValueError, match="None"):
        graph.replay(None)


def test_a_raw_stream_that_replayed_may_be_destroyed() -> None:
    """Its replay is recorded at once, so that the next one elsewhere can wait for it."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    graph, raw = captured(device, ws, main), device.new_raw_stream()
    graph.replay(raw)
    device.destroy_stream(raw)
    graph.replay(main)
    graph.release()
    write(device, ws, "after", MIB, ws.stream("other"))
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize("released", [False, True])
def test_a_graph_replays_between_its_capture_and_its_release(released: bool) -> None:
    """Before and after it is refused by name."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    if released:
        graph = captured(device, ws, main)
        graph.release()
        match = "is released"
    else:
        with ws.on(main), ws.capture() as capture:
            graph = capture.graph
            with pytest.raises(GraphError, match="not been captured to its end"):
                graph.replay(ws.stream("other"))
        with pytest.raises(CaptureError, match="not open"):
            capture.eager_break(lambda: None)
        return
    with pytest.raises(GraphError, match=match):
        graph.replay(main)


def test_a_replay_inside_a_capture_is_refused() -> None:
    """The order of its footprint could not be restored at the outer graph's replays."""
    device, ws = scene(reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    graph = captured(device, ws, main)
    with ws.on(other), ws.capture():
        with pytest.raises(GraphError, match="which is capturing"):
            graph.replay()
        graph.replay(main)
    assert device.verdict() == "SAFE"


def test_a_capture_in_a_capture_is_refused() -> None:
    """One at a time on a stream; the outer one goes on."""
    device, ws = scene(reserve=MIB)
    with ws.on(ws.stream("main")):
        with ws.capture() as capture:
            with pytest.raises(CaptureError, match="capturing already"), ws.capture():
                pass
        capture.graph.replay()


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_first_acquire_that_was_not_reserved_is_refused(strategy: str) -> None:
    """A capture allocates nothing; the error says what to call, and the capture may go on with what there is."""
    _, ws = scene(strategy)
    with ws.on(ws.stream("main")), ws.capture():
        with pytest.raises(CaptureError, match="reserve first") as caught:
            ws.acquire(BYTES, N=4096)
    assert caught.value.fields["asked"] == 4096
    assert ws.snapshot().footprints == {}


def test_leases_of_a_capture_end_inside_it() -> None:
    """One that is still held would be overwritten by the lane's next graph: refused, with its owner."""
    _, ws = scene(reserve=MIB)
    with pytest.raises(CaptureError, match="ends while it holds bytes"), ws.on(ws.stream("main")), ws.capture():
        lease = ws.acquire(BYTES, N=4096)
    assert lease.released and ws.snapshot().footprints == {}
    with pytest.raises(LeaseReleased):
        lease.release()


def test_inside_a_capture_bytes_are_reused_by_captured_edges_only() -> None:
    """Main's next lease may overlap its own last one and, after the join, the branch's; before it, not."""
    device, ws = scene(reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture:
        with ws.fork(aux) as branch:
            with branch(aux), ws.lease(BYTES, N=4096) as lease:
                device.launch("branch", writes=[lease.x])
                inside = lease.x.data_ptr()
            with ws.lease(BYTES, N=8192) as lease:
                device.launch("parent", writes=[lease.x])
                assert lease.x.data_ptr() >= inside + 4096
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("joined", writes=[lease.x])
    capture.graph.replay()
    assert device.verdict() == "SAFE" and capture.graph.footprint == 4096 + 8192


@pytest.mark.parametrize("host_saw", [False, True])
def test_device_order_of_before_does_not_hold_inside(host_saw: bool) -> None:
    """Replay entry restores it: the eager use on another stream and the replay are ordered either way."""
    device, ws = scene(reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    write(device, ws, "eager", SLAB, other)
    if host_saw:
        ws.synchronize()
    graph = captured(device, ws, main, SLAB)
    graph.replay(main)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == (0 if host_saw else 1)


# -- leases of before the capture ----------------------------------------------------------------------------


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_lease_held_when_a_capture_begins_is_the_graphs_too(
    monkeypatch: pytest.MonkeyPatch, steady: bool, pinned: bool
) -> None:
    """Its release gives nothing back before the graph is gone."""
    if not pinned:
        from workspace.capture import Capture

        monkeypatch.setattr(Capture, "keep_held", lambda capture: None)
    device, ws = scene(steady=steady, reserve=SLAB)
    main = ws.stream("main")
    with ws.on(main):
        write(device, ws, "warm", SLAB, main)
        with ws.lease(BYTES, N=SLAB) as lease:
            device.launch("fill", writes=[lease.x])
            with ws.capture() as capture:
                device.launch("read", reads=[lease.x])
    assert ws.snapshot().allocated == (SLAB if pinned else 0)
    write(device, ws, "one", SLAB, ws.stream("other"))
    capture.graph.replay(main)
    write(device, ws, "two", SLAB, ws.stream("other"))
    assert device.verdict() == ("SAFE" if pinned else "UNSAFE")
    capture.graph.release()
    assert ws.snapshot().allocated == 0


@pytest.mark.parametrize("graph_ends_first", [True, False])
def test_replays_count_as_uses_of_a_kept_lease(graph_ends_first: bool) -> None:
    """Whichever ends first, the bytes come after the last replay (on another stream than the lease's)."""
    device, ws = scene(reserve=2 * SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    with ws.on(main):
        lease = ws.acquire(BYTES, N=SLAB)
        device.launch("fill", writes=[lease.x])
        with ws.capture() as capture:
            device.launch("read", reads=[lease.x])
    ws.synchronize()
    capture.graph.replay(other)
    if graph_ends_first:
        capture.graph.release()
        lease.release()
    else:
        lease.release()
        capture.graph.release()
    write(device, ws, "one", SLAB, main)
    write(device, ws, "two", SLAB, main)
    assert device.verdict() == "SAFE"


def test_an_old_release_stamp_does_not_stand_for_later_replays() -> None:
    """The acquirer has since waited for the replay; a stream that only knows the release has not."""
    device, ws = scene()
    first, second, third = (ws.stream(name) for name in "abc")
    lease = ws.acquire(BYTES, stream=first, N=SLAB)
    with ws.on(second), ws.capture() as capture:
        device.launch("read", reads=[lease.x])
    lease.release()
    capture.graph.replay(second)
    released, replayed = ws.event(), ws.event()
    released.record(first)
    released.wait(third)
    replayed.record(second)
    replayed.wait(first)
    capture.graph.release()
    write(device, ws, "next", SLAB, third)
    assert device.verdict() == "SAFE"


def test_a_single_tensor_used_in_a_capture_lives_as_long_as_the_graph() -> None:
    """Declared inside, its bytes outlast its storage."""
    device, ws = scene(reserve=SLAB)
    import torch

    main = ws.stream("main")
    with ws.on(main):
        tensor = ws.empty((SLAB // 2,), torch.uint8)
        with ws.capture() as capture:
            ws.use(tensor, main)
            device.launch("read", reads=[tensor])
    del tensor
    gc.collect()
    assert ws.snapshot().allocated == SLAB // 2
    write(device, ws, "eager", SLAB // 2, ws.stream("other"))
    capture.graph.replay(main)
    capture.graph.release()
    assert ws.snapshot().allocated == 0 and device.verdict() == "SAFE"


# -- size --------------------------------------------------------------------------------------------------------


def test_unlock_and_close_are_refused_while_graphs_exist() -> None:
    """They hold addresses; another workspace of the device is not concerned."""
    import workspace

    device, ws = scene(reserve=MIB)
    draft = workspace.create("event_fenced", device=device)
    main = ws.stream("main")
    graph = captured(device, ws, main)
    ws.lock()
    for call in (ws.unlock, ws.close):
        with pytest.raises(LockError, match="1 graphs exist"):
            call()
    draft.lock()
    draft.unlock()
    draft.close()
    graph.release()
    ws.unlock()
    ws.close()


def test_trim_spares_footprints() -> None:
    """Addresses a graph has seen stay valid, whatever is trimmed or retired around them."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    graph = captured(device, ws, main, MIB // 2)
    with ws.lease(BYTES, N=4 * SLAB):
        pass
    assert ws.trim() == 4 * SLAB
    graph.replay(main)
    assert ws.snapshot().footprints == {"main": MIB // 2} and device.verdict() == "SAFE"


def test_a_graph_dropped_without_release_gives_its_bytes_back() -> None:
    """The next acquire notices."""
    device, ws = scene(reserve=MIB)
    graph = captured(device, ws, ws.stream("main"))
    assert ws.snapshot().footprints == {"main": 4096}
    del graph
    gc.collect()
    assert ws.snapshot().footprints == {}
    check_books(ws)


def test_a_replayed_graph_dropped_without_release_gives_its_bytes_back() -> None:
    """Also while the device judges what it did."""
    device, ws = scene(reserve=MIB)
    graph = captured(device, ws, ws.stream("main"))
    graph.replay(ws.stream("main"))
    del graph
    gc.collect()
    assert ws.snapshot().footprints == {}


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
def test_what_a_capture_was_keeps_nothing_of_its_graph(strategy: str) -> None:
    """The name of a ``with`` outlives it: a released graph's breaks, and what they keep, go all the same."""
    _, ws = host(strategy)
    ws.declare(BYTES, N=MIB, lane="main")
    ws.reserve()
    with ws.on(ws.stream("main")), ws.capture() as capture:
        with ws.lease(BYTES, N=MIB) as lease:
            capture.eager_break(partial(len, [lease.x]))
    del lease
    capture.graph.replay()
    capture.graph.release()
    ws.synchronize()
    ws.trim()
    assert ws.snapshot().pinned == () and ws.snapshot().reserved == 0
    assert capture.graph.segments == 0
