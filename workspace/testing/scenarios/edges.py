"""d10: what orders a capture and its replays."""

from __future__ import annotations

from workspace.errors import CaptureError
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario


@scenario("d10-before", "P", "lane.enter")
def event_of_before_a_capture(bench: Bench) -> None:
    """S0 had waited for S1's use before the capture; a replay on S2 waits for it anew."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 3)
    bench.order(bench.main, s1)
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 3)
    ws.use(lease, s1)
    done = ws.event()
    done.record(s1)
    done.wait()
    lease.release()
    graph, copy = bench.graph(ws, 101, nbytes)
    with ws.on(s2):
        graph.replay()
    bench.expect(copy, 101)
    bench.check()


@scenario("d10-host", "P", "host order", evidence="failure")
def work_seen_complete_before_a_capture(bench: Bench) -> None:
    """Work the host has seen complete may be reused inside any capture, also one replayed unseen."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 3)
    bench.order(bench.main, s1)
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 3)
    ws.use(lease, s1)
    lease.release()
    ws.synchronize()
    with bench.foreign_capture(bench.main) as captured, ws.lease(BLOCK, N=nbytes) as inside:
        bench.fill(inside.data, 102)
        copy = bench.copy(inside.data)
    captured.replay()
    bench.expect(copy, 102)
    bench.check()


@scenario("d10-event", "P", "host order", evidence="failure")
def query_before_a_capture(bench: Bench) -> None:
    """An event seen complete by a query is host order; one that is not is none."""
    ws, nbytes = bench.ws, bench.mib(4)
    with ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 3)
    done = ws.event()
    done.record()
    bench.settle()
    require(done.query(), "the event is not complete")
    with bench.foreign_capture(bench.main) as captured, ws.lease(BLOCK, N=nbytes) as inside:
        bench.fill(inside.data, 102)
        copy = bench.copy(inside.data)
    captured.replay()
    bench.expect(copy, 102)
    bench.check()


@scenario("d10-after", "P", "child timeline")
def edge_captured_orders_nothing_eager(bench: Bench) -> None:
    """A fork and join captured on S0 and S1 order nothing that runs there eagerly afterwards."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 3)
    bench.order(bench.main, s1)
    bench.slow(s1)
    bench.expect(bench.copy(lease.data, s1), 3)
    ws.use(lease, s1)
    lease.release()
    with ws.capture() as capture, ws.fork(s1) as branch, branch(s1):
        bench.slow()
    capture.graph.release()
    with ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 4)


@scenario("d10-branch-stream", "P", "lane.leave", evidence="race")
def captured_branch_stream_used_eagerly(bench: Bench) -> None:
    """A stream that was a branch of a capture works eagerly beside the graph's replay on another stream."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    bench.reserve(ws, nbytes)
    with ws.capture() as capture, ws.fork(s1) as branch, branch(s1), ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 104)
        bench.slow()
        copy = bench.copy(lease.data)
    capture.graph.replay(s2)
    bench.expect(copy, 104)
    capture.graph.release()
    with ws.on(s1), ws.lease(BLOCK, N=nbytes) as again:
        bench.fill(again.data, 4)


@scenario("d10-lease-across", "R")
def lease_across_the_border(bench: Bench) -> None:
    """A lease of the one side is declared used on the other: refused, and the capture survives."""
    ws, nbytes = bench.ws, bench.mib(1)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes, count=2)
    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes) as inside:
        with ws.on(s1):
            late = ws.acquire(OTHER, N=nbytes)
        with refused(CaptureError):
            ws.use(late, bench.main)
        with refused(CaptureError):
            ws.use(inside, s1)
        late.release()
        bench.fill(inside.data, 1)
        copy = bench.copy(inside.data)
    capture.graph.replay()
    bench.expect(copy, 1)
