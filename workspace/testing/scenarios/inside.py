"""d5: inside a capture, and beside it."""

from __future__ import annotations

from workspace.errors import CaptureError
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario


@scenario("d5", "P", "fence")
def reuse_inside_a_capture(bench: Bench) -> None:
    """In a capture a lease is released while its branch still reads: the next one waits, and nothing is queried."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes, count=2)
    before = bench.calls()
    with ws.capture() as capture:
        lease = ws.acquire(BLOCK, N=nbytes)
        bench.fill(lease.data, 51)
        with ws.fork(s1) as branch:
            with branch(s1):
                bench.slow()
                copy = bench.copy(lease.data)
            lease.release()
            with ws.lease(BLOCK, N=nbytes) as again:
                bench.fill(again.data, 52)
                late = bench.copy(again.data)
    made = bench.calls() - before
    require(not made["query"] and not made["synchronize"], f"a capture asked the device: {dict(made)}")
    for _ in range(2):
        capture.graph.replay()
        bench.expect(copy, 51)
        bench.expect(late, 52)
        bench.check()


@scenario("d5-branches", "P", "fence")
def reuse_between_captured_branches(bench: Bench) -> None:
    """A lease released on one captured branch, acquired on the other before any join."""
    ws, nbytes = bench.ws, bench.mib(4)
    s1, s2 = bench.streams(2)
    bench.reserve(ws, nbytes)
    with ws.capture() as capture, ws.fork(s1, s2) as branch:
        with branch(s1), ws.lease(BLOCK, N=nbytes) as one:
            bench.fill(one.data, 1)
            bench.slow()
            first = bench.copy(one.data)
        with branch(s2), ws.lease(BLOCK, N=nbytes) as two:
            bench.fill(two.data, 2)
            bench.slow()
            second = bench.copy(two.data)
    with ws.on(s1):
        capture.graph.replay()
    bench.expect(first, 1)
    bench.expect(second, 2)
    bench.check()


@scenario("d5-other-thread", "P", no_control="a seam that broke the capture would break the bench's own device calls")
def work_of_another_thread_during_a_capture(bench: Bench) -> None:
    """While S0 captures, another thread leases, grows, queries and synchronises: the capture survives."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes)

    def other() -> None:
        with ws.on(s1):
            done = ws.event()
            with ws.lease(OTHER, N=bench.mib(16)) as lease:
                bench.fill(lease.data, 9)
                done.record()
            done.query()
            done.synchronize()
            ws.synchronize(s1)
            ws.synchronize()
            ws.trim()
            ws.snapshot()

    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 1)
        bench.in_thread(other)
        copy = bench.copy(lease.data)
    capture.graph.replay()
    bench.expect(copy, 1)


@scenario("d5-synchronised", "P", "fence")
def synchronised_while_a_stream_captures(bench: Bench) -> None:
    """A device synchronisation leaves out a stream that captures: its earlier work is not taken for complete."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    with ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 1)
        bench.slow()
        bench.expect(bench.copy(lease.data), 1)

    def other() -> None:
        ws.synchronize()
        with ws.on(s1), ws.lease(BLOCK, N=nbytes) as again:
            bench.fill(again.data, 2)
            bench.expect(bench.copy(again.data), 2)

    with ws.capture():
        bench.in_thread(other)


@scenario("d5-own-queries", "R")
def queries_of_a_captured_event(bench: Bench) -> None:
    """What would break the capture on a device is refused before the device hears of it."""
    ws, nbytes = bench.ws, bench.mib(1)
    (s1,) = bench.streams(1)
    outside = ws.event()
    outside.record()
    bench.reserve(ws, nbytes)
    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 1)
        inside = ws.event()
        inside.record()
        for call in (inside.query, inside.synchronize, outside.wait, lambda: ws.synchronize(bench.main), ws.reserve):
            with refused(CaptureError):
                call()
        with ws.on(s1), refused(CaptureError), ws.fork(bench.main):
            pass
        with refused(CaptureError):
            ws.persistent("counters", (16,), lease.data.dtype)
        with refused(CaptureError):
            ws.empty((16,), lease.data.dtype)
        copy = bench.copy(lease.data)
    capture.graph.replay()
    bench.expect(copy, 1)
