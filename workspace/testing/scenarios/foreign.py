"""d7: captures begun elsewhere, and what a graph uses that was leased before it."""

from __future__ import annotations

import gc

import torch

from workspace.errors import CaptureError
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.canaries import survives
from workspace.testing.failure import fails, require
from workspace.testing.scenario import scenario


@scenario("d7", "P", "footprint", evidence="bytes")
def capture_begun_elsewhere(bench: Bench) -> None:
    """A lease inside a capture that the library did not begin, eager leases of its size afterwards, raw replays."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes, lane=None, count=2)
    with bench.foreign_capture(bench.main) as captured, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 71)
        bench.slow()
        copy = bench.copy(lease.data)
    for _ in range(2):
        survives(bench, ws, captured.replay, copy, 71, nbytes)
    captured.reset()
    ws.trim()
    gone = bench.soon(lambda: not any(ws.snapshot().footprints.values()))
    require(gone, "the footprint outlives its graph")


@scenario("d7-unfinished", "P", "complete only")
def raw_replay_beside_an_older_use(bench: Bench) -> None:
    """Bytes whose earlier use may be unfinished are not lent to a graph that is replayed unseen."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    bench.reserve(ws, nbytes, lane=None)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 3)
    bench.order(bench.main, s1)
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 3)
    ws.use(lease, s1)
    lease.release()
    copy = None
    with bench.foreign_capture(bench.main) as captured:
        try:
            with ws.lease(BLOCK, N=nbytes) as inside:
                bench.fill(inside.data, 71)
                copy = bench.copy(inside.data)
        except CaptureError as error:
            require("synchronize" in str(error), f"the refusal does not say what to do: {error}")
    with ws.on(s2):
        captured.replay()
    if copy is not None:
        bench.expect(copy, 71)


@scenario("d7-adopted", "P", "lane.enter", "lane.leave")
def capture_begun_elsewhere_and_adopted(bench: Bench) -> None:
    """Adopted inside its capture, the graph shares a lane and is ordered by replaying it through the library."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes, lane="main")
    with bench.foreign_capture(bench.main):
        graph = ws.adopt()
        with ws.lease(BLOCK, N=nbytes) as lease:
            bench.fill(lease.data, 72)
            bench.slow()
            copy = bench.copy(lease.data)
    own, other = bench.graph(ws, 73, nbytes)
    for _ in range(2):
        graph.replay(s1)
        own.replay()
        bench.expect(copy, 72)
        bench.expect(other, 73)
        bench.check()


@scenario("d7-aborted", "P", "footprint", evidence="bytes")
def foreign_capture_that_raises(bench: Bench) -> None:
    """A foreign capture raises half-way: its bytes are free again, those of an earlier one are not."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes, lane=None, count=2)
    with bench.foreign_capture(bench.main) as captured, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 71)
        copy = bench.copy(lease.data)
    before = ws.snapshot()

    def failing() -> None:
        with bench.foreign_capture(bench.main), ws.lease(BLOCK, N=nbytes):
            raise KeyError

    fails(failing)
    require(ws.snapshot().footprints == before.footprints, "a failed capture keeps bytes")
    survives(bench, ws, captured.replay, copy, 71, nbytes)


@scenario("d7-held", "P", "keep_held", evidence="bytes")
def lease_of_before_a_capture(bench: Bench) -> None:
    """A graph reads a lease taken before its capture and released after: the bytes stay its own until it goes."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes, lane=None)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 74)
    with ws.capture() as capture:
        copy = bench.copy(lease.data)
    lease.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 1)
        capture.graph.replay()
        bench.expect(copy, 74)
        bench.check()
    capture.graph.release()


@scenario("d7-held-released-last", "P", "fence", evidence="race")
def graph_gone_before_the_lease_it_read(bench: Bench) -> None:
    """The graph is destroyed behind its replay on S1, then the lease it read is released: S1's read still counts."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 75)
    with ws.capture() as capture:
        bench.slow()
        copy = bench.copy(lease.data)
    bench.order(bench.main, s1)
    capture.graph.replay(s1)
    bench.expect(copy, 75)
    capture.graph.release()
    lease.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 1)


@scenario("d7-single", "P", "pin", evidence="bytes")
def single_tensor_in_two_graphs(bench: Bench) -> None:
    """A single tensor declared used in two captures dies; the first graph goes, the second still reads it."""
    ws, nbytes = bench.ws, bench.mib(4)
    tensor = ws.empty((nbytes,), torch.uint8)
    bench.fill(tensor, 76)
    graphs = []
    for _ in range(2):
        with ws.capture() as capture:
            ws.use(tensor, bench.main)
            copy = bench.copy(tensor)
        graphs.append((capture.graph, copy))
    del tensor
    gc.collect(0)
    graphs[0][0].release()
    ws.synchronize()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 1)
        graphs[1][0].replay()
        bench.expect(graphs[1][1], 76)
        bench.check()


@scenario(
    "d7-poison", "P", virtual=False,
    no_control="the guard is that a fill made for released bytes is no node of the capture",
)  # fmt: skip
def tensor_that_dies_in_a_capture(bench: Bench) -> None:
    """In debug mode a single tensor dies while its stream captures: what it leaves behind is not filled at replays."""
    ws, nbytes = bench.workspace(poison=True), bench.mib(4)
    bench.reserve(ws, nbytes)
    tensor = ws.empty((nbytes,), torch.uint8)
    bench.fill(tensor, 1)
    with ws.capture() as capture:
        del tensor
        gc.collect(0)
        with ws.lease(BLOCK, N=nbytes) as lease:
            bench.fill(lease.data, 77)
            copy = bench.copy(lease.data)
    with ws.lease(BLOCK, N=nbytes) as one, ws.lease(OTHER, N=nbytes) as two:
        bench.fill(one.data, 2)
        bench.fill(two.data, 3)
        capture.graph.replay()
        bench.expect(copy, 77)
        bench.expect(bench.copy(one.data), 2)
        bench.expect(bench.copy(two.data), 3)
        bench.check()
