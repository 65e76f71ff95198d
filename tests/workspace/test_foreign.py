"""Captures the library did not begin: pinned until released, or adopted; and captures it was not told of."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.workspace.bookkeeping import check_books
from tests.workspace.scene import BYTES, MIB, SLAB, scene, write
from workspace import Workspace
from workspace.errors import CaptureError, GraphError, LateUse
from workspace.graph import Graph
from workspace.lane import Lane
from workspace.pins import Pins
from workspace.simulated import Device, SimulatedGraph
from workspace.streams import Stream

BLOCKS = ["event_fenced", "per_stream"]


@contextmanager
def raw_capture(device: Device, ws: Workspace, stream: Stream) -> Iterator[list[SimulatedGraph]]:
    """As ``torch.cuda.graph``: the device is told to capture, the library only notices."""
    graphs: list[SimulatedGraph] = []
    with ws.on(stream):
        device.begin_capture(stream.key)
        try:
            yield graphs
        except BaseException:
            device.abort_capture(stream.key)
            raise
        graphs.append(device.end_capture(stream.key))


def lease_inside(device: Device, ws: Workspace, nbytes: int = 4096) -> None:
    with ws.lease(BYTES, N=nbytes) as lease:
        device.launch("captured", writes=[lease.x])


def held_no_longer(lane: Lane) -> bool:
    return lane.captures > 0


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("pinned", [True, False])
def test_a_raw_replay_is_safe(monkeypatch: pytest.MonkeyPatch, strategy: str, pinned: bool) -> None:
    """Its bytes are lent to nobody while the graph exists: the library does not learn of the replays."""
    if not pinned:
        monkeypatch.setattr(Lane, "in_use", property(held_no_longer))
    device, ws = scene(strategy, reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    with raw_capture(device, ws, main) as graphs:
        lease_inside(device, ws, SLAB)
    write(device, ws, "eager", SLAB, other)
    graphs[0].launch(main.key)
    write(device, ws, "eager", SLAB, other)
    assert device.verdict() == ("SAFE" if pinned else "UNSAFE")


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_raw_graph_gets_only_bytes_the_host_saw_complete(strategy: str) -> None:
    """Nothing could be ordered before a raw replay: else the capture is refused, and after a wait it is served."""
    device, ws = scene(strategy, reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    write(device, ws, "eager", SLAB, other)
    with pytest.raises(CaptureError, match="seen complete by the host"), raw_capture(device, ws, main):
        lease_inside(device, ws)
    assert ws.snapshot().footprints == {} and not ws.timeline.captures
    ws.synchronize()
    with raw_capture(device, ws, main) as graphs:
        lease_inside(device, ws)
    graphs[0].launch(main.key)
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize("how", ["reset", "dropped"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_raw_graphs_bytes_return_once_the_device_is_idle(
    monkeypatch: pytest.MonkeyPatch, how: str, waits: bool
) -> None:
    """A raw replay may be under way on any stream, so the end of the graph waits for the device."""
    if not waits:
        monkeypatch.setattr(Pins, "raw", property(lambda pins: False, lambda pins, value: None), raising=False)
    device, ws = scene(reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    with raw_capture(device, ws, main) as graphs:
        lease_inside(device, ws, SLAB)
    graphs[0].launch(other.key)
    if how == "reset":
        graphs[0].reset()
    graphs.clear()
    gc.collect()
    assert ws.snapshot().footprints == {}
    write(device, ws, "eager", SLAB, main)
    assert device.verdict() == ("SAFE" if waits else "UNSAFE")
    check_books(ws)


def test_a_raw_graph_that_ends_during_a_capture_waits_for_its_end() -> None:
    """The device cannot be waited for while a stream captures: the bytes come back afterwards."""
    device, ws = scene(reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    with raw_capture(device, ws, main) as graphs:
        lease_inside(device, ws)
    graphs[0].launch(main.key)
    with ws.on(other), ws.capture() as capture:
        graphs.pop().reset()
        lease_inside(device, ws, 100)
        assert any(name.startswith("foreign") for name in ws.snapshot().footprints)
    write(device, ws, "next", 100, other)
    assert list(ws.snapshot().footprints) == ["main"]
    capture.graph.replay(other)
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize("after_lease", [False, True])
def test_an_adopted_graph_is_like_one_of_the_librarys(after_lease: bool) -> None:
    """Replayed through the library it may get pending bytes, and shares them between replays."""
    device, ws = scene(reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    if not after_lease:
        write(device, ws, "pending", SLAB, other)
    with raw_capture(device, ws, main):
        if after_lease:
            lease_inside(device, ws)
        graph = ws.adopt("decode")
        assert ws.adopt() is graph
        lease_inside(device, ws)
        with pytest.raises(GraphError, match="not been captured"):
            graph.replay(other)
    for stream in (main, other, main):
        graph.replay(stream)
    graph.release()
    write(device, ws, "after", SLAB, other)
    assert device.verdict() == "SAFE" and ws.snapshot().footprints == {}


def test_adoption_is_for_captures_begun_elsewhere() -> None:
    """Outside a capture, or in one of the library's, there is nothing to adopt."""
    _, ws = scene(reserve=MIB)
    with pytest.raises(GraphError, match="outside a capture"):
        ws.adopt()
    with ws.on(ws.stream("main")), ws.capture():
        with pytest.raises(GraphError, match=r"its graph is `capture\.graph`"):
            ws.adopt()


def test_an_adopted_capture_that_fails_has_no_graph() -> None:
    """And leaves nothing behind."""
    device, ws = scene(reserve=MIB)
    graphs: list[Graph] = []
    with pytest.raises(KeyError), raw_capture(device, ws, ws.stream("main")):
        graphs.append(ws.adopt())
        ws.acquire(BYTES, N=4096)
        raise KeyError
    with pytest.raises(GraphError):
        graphs[0].replay(ws.stream("main"))
    assert ws.snapshot().footprints == {} and ws.snapshot().allocated == 0 and not ws.timeline.state.held
    check_books(ws)


def fork_inside(device: Device, ws: Workspace) -> None:
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=4096) as lease, ws.fork(aux) as branch, branch(aux):
        device.launch("branch", writes=[lease.x])


@pytest.mark.parametrize("inside", [lease_inside, fork_inside])
def test_a_foreign_capture_takes_leases_and_forks(inside: Callable[[Device, Workspace], None]) -> None:
    """Model code inside ``torch.cuda.graph`` is the same code."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    with raw_capture(device, ws, main) as graphs:
        inside(device, ws)
        inside(device, ws)
    for _ in range(2):
        graphs[0].launch(main.key)
    write(device, ws, "eager on aux", 4096, ws.stream("aux"))
    assert device.verdict() == "SAFE" and len(ws.snapshot().footprints) == 1


def test_a_lease_held_when_a_foreign_capture_begins_is_kept() -> None:
    """Its bytes return after the graph and the device's idleness."""
    device, ws = scene(reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    with ws.on(main):
        lease = ws.acquire(BYTES, N=SLAB)
    device.launch("fill", writes=[lease.x], stream=main.key)
    with raw_capture(device, ws, main) as graphs:
        device.launch("read", reads=[lease.x])
    lease.release()
    write(device, ws, "eager", SLAB, other)
    graphs[0].launch(main.key)
    assert ws.snapshot().allocated == SLAB
    graphs.pop().reset()
    write(device, ws, "eager", SLAB, main)
    assert ws.snapshot().allocated == 0 and device.verdict() == "SAFE"


def test_a_foreign_capture_without_leases_is_no_business_of_the_library() -> None:
    """It pins nothing, and the workspace may be unlocked and closed."""
    device, ws = scene(reserve=MIB)
    ws.lock()
    with raw_capture(device, ws, ws.stream("main")) as graphs:
        device.launch("theirs")
    assert len(graphs) == 1
    ws.unlock()
    ws.close()


def test_a_late_use_of_a_foreign_captures_lease_is_refused() -> None:
    """What is still held at the end is the graph's: later declarations are late."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    with raw_capture(device, ws, main):
        lease = ws.acquire(BYTES, N=100)
    with pytest.raises(LateUse):
        lease.use(main)
    assert not ws.timeline.state.held and ws.snapshot().allocated == 0


def untold(device: Device) -> None:
    """Captures from now on are begun by raw calls, which nobody can wrap."""
    device._watchers.clear()


def test_a_capture_the_library_was_not_told_of_is_refused() -> None:
    """While another one is open the library looks, and names the setting; the capture itself survives."""
    device, ws = scene(reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    with ws.on(main), ws.capture():
        untold(device)
        with raw_capture(device, ws, other):
            with pytest.raises(CaptureError, match="foreign_captures='query'"):
                ws.acquire(BYTES, N=100)


def test_with_query_a_capture_is_found_at_its_first_acquire() -> None:
    """The library asks the device at each acquire, and the graph is pinned as any foreign one."""
    device, ws = scene(reserve=SLAB, foreign_captures="query")
    untold(device)
    main, other = ws.stream("main"), ws.stream("other")
    with raw_capture(device, ws, main) as graphs:
        lease_inside(device, ws, SLAB)
    write(device, ws, "eager", SLAB, other)
    graphs[0].launch(main.key)
    assert device.verdict() == "SAFE"
