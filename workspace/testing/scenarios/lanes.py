"""e: graphs beside eager work, two models on one device, micro-batches."""

from __future__ import annotations

from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import require
from workspace.testing.scenario import scenario


@scenario("e1", "P", "footprint", evidence="corruption")
def decode_graph_beside_eager_prefill(bench: Bench) -> None:
    """A graph replays on S0 while eager work of the same size runs on S1 from the same workspace."""
    ws, nbytes = bench.ws, bench.mib(8)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes, lane="decode")
    graph, copy = bench.graph(ws, 11, nbytes, "decode")
    for step in range(3):
        graph.replay()
        bench.expect(copy, 11)
        with ws.on(s1), ws.lease(BLOCK, N=nbytes) as prefill:
            bench.fill(prefill.data, 20 + step)
            bench.slow()
            bench.expect(bench.copy(prefill.data), 20 + step)
        graph.replay()
    bench.check()


@scenario("e1-forced", "D", "judge", evidence="failure")
def footprint_shared_by_force(bench: Bench) -> None:
    """The user keeps a tensor of the graph's lease and writes it from S1: reported."""
    ws, nbytes = bench.ws, bench.mib(8)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes, lane="decode")
    with ws.capture(lane="decode") as capture, ws.lease(BLOCK, N=nbytes) as lease:
        data = bench.tensor(lease.data)
        bench.fill(data, 11)
    capture.graph.replay()
    bench.fill(data, 20, s1)
    bench.detect("fill 11", "fill 20")


@scenario("e1-lanes", "P", "footprint", evidence="bytes")
def graphs_of_two_lanes_at_once(bench: Bench) -> None:
    """Graphs of two lanes replay on two streams at once, and twice each on the other's stream."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    made = {}
    for lane in ("decode", "draft"):
        bench.reserve(ws, nbytes, lane=lane)
    for value, lane in ((11, "decode"), (12, "draft")):
        made[lane] = (*bench.graph(ws, value, nbytes, lane), value)
    for streams in ((s1, s2), (s2, s1)):
        for (graph, copy, value), stream in zip(made.values(), streams, strict=True):
            graph.replay(stream)
            bench.expect(copy, value)
    for graph, copy, value in made.values():
        graph.replay()
        bench.expect(copy, value)
    bench.check()


@scenario("e2", "P", "exclusive", evidence="bytes")
def target_and_draft(bench: Bench) -> None:
    """Two workspaces hold views at once; the draft's grows; the target's data is intact."""
    target, draft = bench.ws, bench.workspace()
    (s1,) = bench.streams(1)
    require(target.timeline is draft.timeline, "two workspaces of one device do not share its timeline")
    held = target.acquire(BLOCK, N=bench.mib(2))
    more = target.acquire(OTHER, N=bench.mib(2))
    bench.fill(held.data, 1)
    bench.fill(more.data, 4)
    with target.fork(s1) as branch, branch(s1):
        for size in (2, 4, 16):
            with draft.lease(BLOCK, N=bench.mib(size)) as lease, draft.lease(OTHER, N=bench.mib(size)) as other:
                bench.fill(lease.data, 2)
                bench.fill(other.data, 3)
                bench.slow()
                bench.expect(bench.copy(lease.data), 2)
                bench.expect(bench.copy(other.data), 3)
    bench.expect(bench.copy(held.data), 1)
    bench.expect(bench.copy(more.data), 4)
    held.release()
    more.release()
    draft.close()


@scenario("e2-fence", "P", "fence")
def one_timeline_for_two_workspaces(bench: Bench) -> None:
    """The draft forks inside the target's lease: a late use there counts when the target's bytes come back."""
    target, draft = bench.ws, bench.workspace()
    (s1,) = bench.streams(1)
    with target.lease(BLOCK, N=bench.mib(2)) as lease:
        bench.fill(lease.data, 1)
        with draft.fork(s1) as branch, branch(s1), draft.lease(BLOCK, N=bench.mib(1)) as own:
            bench.fill(own.data, 5)
        bench.slow(s1)
        bench.expect(bench.copy(lease.data, s1), 1)
        draft.use(lease.data, s1)
    with target.lease(BLOCK, N=bench.mib(2)) as again:
        bench.fill(again.data, 2)


@scenario("e2-graphs", "P", "footprint", evidence="bytes")
def graphs_of_target_and_draft(bench: Bench) -> None:
    """One capture leases from both workspaces; the draft alone may be closed once the graph has gone."""
    target, draft = bench.ws, bench.workspace()
    nbytes = bench.mib(2)
    bench.reserve(target, nbytes)
    bench.reserve(draft, nbytes)
    with target.capture() as capture:
        with target.lease(BLOCK, N=nbytes) as one, draft.lease(BLOCK, N=nbytes) as two:
            bench.fill(one.data, 21)
            bench.fill(two.data, 22)
            copies = bench.copy(one.data), bench.copy(two.data)
    with target.lease(BLOCK, N=nbytes) as a, draft.lease(BLOCK, N=nbytes) as b:
        bench.fill(a.data, 1)
        bench.fill(b.data, 2)
        capture.graph.replay()
        for copy, value in zip((*copies, bench.copy(a.data), bench.copy(b.data)), (21, 22, 1, 2), strict=True):
            bench.expect(copy, value)
        bench.check()
    capture.graph.release()
    ws_graph, right = bench.graph(target, 23, nbytes)
    draft.close()
    ws_graph.replay()
    bench.expect(right, 23)


@scenario("e2-owners", "P", "fence", "declare")
def owners_with_strategies_of_their_own(bench: Bench) -> None:
    """One owner under another strategy: a fork inside both leases, a late use of each."""
    other = "caching" if bench.strategy != "caching" else "event_fenced"
    ws = bench.workspace(owners={"mla": other})
    (s1,) = bench.streams(1)
    mla = ws.owner("mla")
    require(mla.strategy == other and ws.strategy == bench.strategy, "the owner's strategy is not its own")
    for step in range(3):
        with ws.lease(BLOCK, N=bench.mib(2)) as one, mla.lease(BLOCK, N=bench.mib(2)) as two:
            bench.fill(one.data, step + 1)
            bench.fill(two.data, step + 101)
            bench.order(bench.main, s1)
            bench.slow(s1)
            for lease, value in ((one, step + 1), (two, step + 101)):
                bench.expect(bench.copy(lease.data, s1), value)
                ws.use(lease, s1)


@scenario("e3", "P", "slots", evidence="failure")
def micro_batches_grow_together(bench: Bench) -> None:
    """Two threads, one micro-batch each: only the first was warmed up before the lock, and the second fits."""
    ws = bench.workspace(micro_batches=2)
    nbytes = bench.mib(64)
    s1, s2 = bench.streams(2)
    with ws.slot(micro_batch=0), ws.lease(BLOCK, N=nbytes) as warm:
        bench.fill(warm.data, 1)
    ws.lock()
    first = ws.acquire(BLOCK, N=nbytes)
    bench.fill(first.data, 31)

    def second() -> None:
        with ws.slot(micro_batch=1), ws.on(s2), ws.lease(BLOCK, N=nbytes) as lease:
            bench.fill(lease.data, 32)
            bench.slow()
            bench.expect(bench.copy(lease.data), 32)

    bench.in_thread(second)
    bench.expect(bench.copy(first.data), 31)
    first.release()


@scenario("e3-lanes", "P", "footprint", evidence="bytes")
def micro_batches_with_lanes(bench: Bench) -> None:
    """Two micro-batches, each with a lane of its own and eager work between the replays."""
    ws = bench.workspace(micro_batches=2)
    nbytes = bench.mib(2)
    streams = bench.streams(2)
    made = []
    for number in range(2):
        bench.reserve(ws, nbytes, lane=f"ubatch{number}")
    for number, stream in enumerate(streams):
        with ws.slot(lane=f"ubatch{number}", micro_batch=number), ws.on(stream):
            made.append(bench.graph(ws, 41 + number, nbytes))
    for _ in range(2):
        held = []
        for number, stream in enumerate(streams):
            with ws.slot(micro_batch=number), ws.on(stream):
                lease = ws.acquire(OTHER, N=nbytes)
                bench.fill(lease.data, 51 + number)
                made[number][0].replay()
                bench.expect(made[number][1], 41 + number)
                held.append(lease)
        for number, stream in enumerate(streams):
            with ws.slot(micro_batch=number), ws.on(stream):
                bench.expect(bench.copy(held[number].data), 51 + number)
                held[number].release()
    bench.check()
