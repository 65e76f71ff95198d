"""g: growth and what it leaves behind."""

from __future__ import annotations

import gc

from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import require
from workspace.testing.scenario import scenario


@scenario("g1", "P", "give up", evidence="failure", real=False)
def ever_larger_requests(bench: Bench) -> None:
    """64, 64.5 ... 128 MiB, each leased once: what is reserved stays near the largest, on the device too."""
    ws = bench.ws
    for step in range(129):
        nbytes = bench.mib(64 + step / 2)
        with ws.lease(BLOCK, N=nbytes) as lease:
            bench.fill(lease.data, step + 1)
            require(ws.snapshot().reserved <= 1.25 * nbytes, f"{ws.snapshot().reserved} bytes reserved for {nbytes}")
        require(bench.reserved() <= 1.25 * nbytes, f"the device has {bench.reserved()} bytes reserved for {nbytes}")


@scenario("g1-two-streams", "P", "give up", evidence="failure", real=False)
def larger_requests_from_two_streams(bench: Bench) -> None:
    """The same from two streams in turn, sizes up and down."""
    ws = bench.ws
    s1, s2 = bench.streams(2)
    sizes = [64 + 8 * step for step in range(9)] + [96, 64, 128]
    for number, size in enumerate(sizes):
        with ws.on((s1, s2)[number % 2]), ws.lease(BLOCK, N=bench.mib(size)) as lease:
            bench.fill(lease.data, number + 1)
            bench.slow()
            bench.expect(bench.copy(lease.data), number + 1)
    ws.synchronize()
    ws.trim()
    require(ws.snapshot().reserved <= 1.25 * bench.mib(128), f"{ws.snapshot().reserved} bytes reserved once idle")


@scenario("g2", "P", "fence before growth", evidence="failure")
def host_ahead_of_the_device(bench: Bench) -> None:
    """200 steps ahead, each 32 MiB read on S1: at most d more than one are reserved, d the leases let in flight."""
    nbytes = bench.mib(32)
    workspaces = {ahead: bench.workspace(in_flight=ahead) for ahead in (0, 2)}
    for ahead in workspaces:
        ws = workspaces[ahead]
        (s1,) = bench.streams(1)
        for step in range(bench.times(200)):
            with ws.lease(BLOCK, N=nbytes) as lease:
                value = step % 250 + 1
                bench.fill(lease.data, value)
                bench.order(bench.main, s1)
                bench.slow(s1)
                bench.expect(bench.copy(lease.data, s1), value)
                ws.use(lease, s1)
        peak = ws.snapshot().peak_reserved
        require(peak <= (ahead + 1) * nbytes, f"{peak} bytes were reserved with {ahead} leases in flight")
        bench.check()


@scenario("g2-dropped", "P", "declare")
def workspace_dropped_behind_a_reader(bench: Bench) -> None:
    """A workspace goes without close() while S1 still reads: its bytes come back to the framework after the read."""
    (s1,) = bench.streams(1)
    ws, nbytes = bench.workspace(), bench.mib(32)
    with ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 1)
        bench.order(bench.main, s1)
        bench.slow(s1)
        bench.expect(bench.copy(lease.data, s1), 1)
        ws.use(lease, s1)
    del ws, lease
    gc.collect(1)
    with bench.ws.lease(OTHER, N=nbytes) as other:
        bench.fill(other.data, 2)
    tensors = [bench.allocate(nbytes) for _ in range(2)]
    for tensor in tensors:
        bench.fill(tensor, 3)


@scenario("g3", "P", "pinned views", evidence="failure")
def view_that_outlives_its_slab(bench: Bench) -> None:
    """A layer caches a view, the pool grows past it: the old slab is listed by owner until the view goes."""
    ws = bench.ws
    with ws.lease(BLOCK, N=bench.mib(64)) as lease:
        cached = lease.data
    # The block is cut and joined again: the view must not be forgotten with the block it was made for.
    with ws.lease(OTHER, N=bench.mib(1)), ws.lease(BLOCK, N=bench.mib(2)):
        pass
    with ws.lease(OTHER, N=bench.mib(65)) as lease:
        bench.fill(lease.data, 1)
    after = ws.snapshot()
    require(after.retired >= bench.mib(64), f"{after.retired} bytes are listed as retired")
    require("block" in after.pinned, f"the owner of the view is not listed: {after.pinned}")
    require(after.reserved >= bench.mib(129), "retired bytes are not counted as reserved")
    del cached
    gc.collect(0)
    after = ws.snapshot()
    require(not after.retired and not after.pinned, f"still retired after the view went: {after.pinned}")
    ws.trim()
    require(bench.reserved() <= 1.25 * bench.mib(65) or not bench.full, "the memory did not return to the device")


@scenario("g3-graph", "P", "footprint", evidence="failure")
def slab_that_a_graph_keeps(bench: Bench) -> None:
    """A slab that a graph was captured in stays through growth, is counted, and goes with the graph."""
    ws = bench.ws
    bench.reserve(ws, bench.mib(8))
    graph, copy = bench.graph(ws, 1, bench.mib(8))
    with ws.lease(BLOCK, N=bench.mib(64)) as lease:
        bench.fill(lease.data, 2)
    held = ws.snapshot()
    require(sum(held.footprints.values()) >= bench.mib(8), f"the footprint is not listed: {held.footprints}")
    graph.replay()
    bench.expect(copy, 1)
    bench.check()
    graph.release()
    ws.synchronize()

    def nothing_left() -> bool:
        ws.trim()
        return ws.snapshot().reserved == 0

    require(bench.soon(nothing_left), f"{ws.snapshot().reserved} bytes stay reserved")
