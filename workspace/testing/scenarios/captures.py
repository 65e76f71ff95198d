"""d1 to d4: bytes that a captured graph writes at each replay."""

from __future__ import annotations

import gc

from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.canaries import canaries, intact, survives
from workspace.testing.failure import require
from workspace.testing.scenario import scenario


@scenario("d1", "P", "footprint", evidence="bytes")
def growth_after_a_capture(bench: Bench) -> None:
    """A larger request, an emptied cache and 64 tensors of the captured size; then the replay."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes)
    graph, copy = bench.graph(ws, 41, nbytes)
    with ws.lease(OTHER, N=bench.mib(64)) as large:
        bench.fill(large.data, 9)
        tensors = canaries(bench, 32, nbytes)
        bench.empty_cache()
        tensors += canaries(bench, 32, nbytes, first=32)
        graph.replay()
        bench.expect(copy, 41)
        bench.expect(bench.copy(large.data), 9)
        intact(bench, tensors)
        bench.check()
    graph.release()


@scenario("d1-reserved", "P", "footprint", evidence="bytes")
def reservation_after_a_capture(bench: Bench) -> None:
    """A second, larger reserve() and a trim() after a capture leave its bytes where they are."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes)
    graph, copy = bench.graph(ws, 41, nbytes)
    bench.reserve(ws, 4 * nbytes, lane=None, count=2)
    ws.trim()
    with ws.lease(BLOCK, N=nbytes) as one, ws.lease(OTHER, N=nbytes) as two:
        bench.fill(one.data, 1)
        bench.fill(two.data, 2)
        tensors = canaries(bench, 8, nbytes)
        graph.replay()
        bench.expect(copy, 41)
        bench.expect(bench.copy(one.data), 1)
        bench.expect(bench.copy(two.data), 2)
        intact(bench, tensors)
        bench.check()


@scenario("d2", "P", "lane.enter", "lane.leave")
def buckets_in_any_order(bench: Bench) -> None:
    """Sizes captured ascending and descending, replayed in both orders from two streams, the smallest first."""
    ws, unit = bench.ws, bench.mib(0.25)
    streams = [bench.main, *bench.streams(1)]
    sizes = [1, 2, 4, 8, 16, 32, 64]
    for lane, captured in (("ascending", sizes), ("descending", sizes[::-1])):
        bench.reserve(ws, unit * sizes[-1], lane=lane)
        graphs = {size: bench.graph(ws, size, unit * size, lane) for size in captured}
        for replayed in (sizes, sizes[::-1]):
            for number, size in enumerate(replayed):
                graph, copy = graphs[size]
                with ws.on(streams[number % 2]):
                    graph.replay()
                bench.expect(copy, size)
            bench.check()


@scenario("d4", "P", "footprint", evidence="bytes")
def first_of_two_graphs_destroyed(bench: Bench) -> None:
    """The first graph goes, garbage is collected and the cache emptied; the second still owns the footprint."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes)
    first, _ = bench.graph(ws, 1, nbytes)
    second, copy = bench.graph(ws, 2, nbytes)
    first.release()
    del first
    gc.collect(0)
    survives(bench, ws, second.replay, copy, 2, nbytes)
    second.release()
    gone = bench.soon(lambda: not any(ws.snapshot().footprints.values()))
    require(gone, "a footprint outlives its last graph")


@scenario("d4-dropped", "P", "footprint", evidence="bytes")
def graph_dropped_without_release(bench: Bench) -> None:
    """A graph that is only dropped counts as destroyed, and takes no other's bytes with it."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes)
    graph, _ = bench.graph(ws, 1, nbytes)
    kept, copy = bench.graph(ws, 2, nbytes)
    graph.replay()
    del graph
    gc.collect(0)
    survives(bench, ws, kept.replay, copy, 2, nbytes)


@scenario("d4-thread", "P", "footprint", evidence="bytes")
def captured_in_a_thread_that_ends(bench: Bench) -> None:
    """A worker thread captures both graphs, destroys the first, and exits."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes)
    made = []

    def worker() -> None:
        made.append(bench.graph(ws, 1, nbytes))
        made.append(bench.graph(ws, 2, nbytes))
        made[0][0].release()

    bench.in_thread(worker)
    graph, copy = made[1]
    survives(bench, ws, graph.replay, copy, 2, nbytes)
