"""Lanes: graphs that share a footprint, what sharing costs, and slots."""

from __future__ import annotations

import pytest

from tests.workspace.bookkeeping import check_books
from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, scene, write
from tests.workspace.test_capture import captured
from workspace.errors import LockError

BLOCKS = ["event_fenced", "per_stream"]
BUCKETS = [1, 2, 4, 8, 16, 32, 48, 64]


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("forked", [False, True])
def test_eight_buckets_take_little_more_than_the_largest(strategy: str, descending: bool, forked: bool) -> None:
    """Ascending or descending, graphs of a lane overlay each other: at most 1.1 times the largest alone."""

    def footprint(buckets: list[int]) -> int:
        device, ws = scene(strategy, reserve=16 * MIB)
        main, aux = ws.stream("main"), ws.stream("aux")
        graphs = []
        for bucket in sorted(buckets, reverse=descending):
            with ws.on(main), ws.capture() as capture:
                for _ in range(3):  # layers
                    with ws.lease(BYTES, N=bucket * 40_000) as q, ws.lease(OTHER, N=bucket * 9_000) as idx:
                        device.launch("prepare", writes=[q.x, idx.y])
                        if forked:
                            with ws.fork(aux) as branch, branch(aux), ws.lease(BYTES, N=bucket * 5_000) as own:
                                device.launch("branch", reads=[q.x], writes=[own.x])
                        device.launch("attend", reads=[q.x, idx.y])
            graphs.append(capture.graph)
        for graph in (*graphs, *reversed(graphs)):
            graph.replay(main)
        assert device.verdict() == "SAFE"
        check_books(ws)
        return ws.snapshot().footprints["main"]

    assert footprint(BUCKETS) <= 1.1 * footprint(BUCKETS[-1:])


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_graphs_of_a_lane_are_released_in_any_order(strategy: str, order: tuple[int, ...]) -> None:
    """The footprint stays whole until the last one is gone; the others replay on."""
    device, ws = scene(strategy, reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    graphs = [captured(device, ws, main, nbytes) for nbytes in (4096, MIB, 300)]
    for position, index in enumerate(order):
        whole = ws.snapshot().footprints["main"]
        graphs[index].release()
        for rest in order[position + 1 :]:
            graphs[rest].replay((main, other)[rest % 2])
            assert ws.snapshot().footprints["main"] == whole
        write(device, ws, "eager", SLAB - whole, other)
    assert ws.snapshot().footprints == {}
    write(device, ws, "eager", SLAB, other)
    check_books(ws)
    assert device.verdict() == "SAFE" and (strategy == "per_stream" or len(ws.snapshot().slabs) == 1)


@pytest.mark.parametrize("strategy", BLOCKS)
def test_lanes_share_no_byte(strategy: str) -> None:
    """Graphs whose replays may interleave are given different lanes: nothing orders them, and nothing needs to."""
    device, ws = scene(strategy, reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    target, draft = captured(device, ws, main, MIB, "target"), captured(device, ws, other, MIB, "draft")
    before = device.counters.copy()
    for _ in range(3):
        target.replay(main)
        draft.replay(other)
    counted = device.counters - before
    assert counted["wait"] <= 2 and device.verdict() == "SAFE"
    assert ws.snapshot().footprints == {"target": MIB, "draft": MIB}


def test_graphs_of_one_lane_on_two_streams_are_ordered() -> None:
    """Whole replays take turns, one fence each."""
    device, ws = scene(reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    one, two = captured(device, ws, main, MIB), captured(device, ws, main, MIB)
    before = ws.snapshot().fences
    for _ in range(3):
        one.replay(main)
        two.replay(other)
    assert device.verdict() == "SAFE" and ws.snapshot().fences - before == 5


def test_the_slot_names_the_lane() -> None:
    """An omitted lane is the thread's slot's, which ends with its block, also by an exception."""
    device, ws = scene(reserve=SLAB, micro_batches=2)
    main = ws.stream("main")
    with ws.slot(lane="draft", micro_batch=1), ws.on(main), ws.capture() as capture:
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("captured", writes=[lease.x])
    assert ws.snapshot().footprints == {"draft": 4096} and capture.graph.name == "draft"
    with pytest.raises(KeyError), ws.slot(lane="draft"):
        raise KeyError
    assert (ws.timeline.state.lane, ws.timeline.state.micro_batch) == ("main", 0)


@pytest.mark.parametrize("micro_batch", [2, 7])
def test_a_micro_batch_is_one_of_those_configured(micro_batch: int) -> None:
    """The error names the setting."""
    _, ws = scene(micro_batches=2)
    with pytest.raises(LockError, match="micro_batches"), ws.slot(micro_batch=micro_batch):
        pass


def test_a_lane_is_new_once_its_last_graph_is_gone() -> None:
    """A second generation of graphs starts from an empty footprint."""
    device, ws = scene(reserve=SLAB)
    main = ws.stream("main")
    captured(device, ws, main, MIB).release()
    graph = captured(device, ws, main, 4096)
    assert graph.footprint == 4096
