"""d6: captures that fail."""

from __future__ import annotations

from collections.abc import Callable

from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import fails, require
from workspace.testing.scenario import scenario
from workspace.workspace import Workspace


def _breakers(bench: Bench, ws: Workspace) -> list[Callable[[], None]]:
    """Bodies that fail at different points of a capture."""
    s1, s2 = bench.streams(2)
    small, large = bench.mib(1), bench.mib(4)

    def at_once() -> None:
        with ws.capture():
            raise KeyError

    def holding() -> None:
        with ws.capture(), ws.lease(BLOCK, N=large) as lease:
            bench.fill(lease.data, 1)
            raise KeyError

    def unscoped() -> None:
        with ws.capture():
            ws.acquire(BLOCK, N=large)
            raise KeyError

    def in_branch() -> None:
        with ws.capture(), ws.lease(BLOCK, N=large), ws.fork(s1, s2) as branch, branch(s2):
            bench.slow()
            raise KeyError

    def in_break() -> None:
        def fn() -> None:
            with ws.lease(OTHER, N=small) as eager:
                bench.fill(eager.data, 3)
                raise KeyError

        with ws.capture() as capture:
            with ws.lease(BLOCK, N=large) as lease:
                bench.fill(lease.data, 1)
            capture.eager_break(fn)

    def after_break() -> None:
        with ws.capture() as capture, ws.lease(BLOCK, N=large) as lease:
            capture.eager_break(lambda: None)
            bench.fill(lease.data, 1)
            raise KeyError

    def unjoined() -> None:
        with ws.capture():
            done = ws.event()
            done.record()
            done.wait(s1)
            bench.slow(s1)

    def unjoined_at_a_break() -> None:
        with ws.capture() as capture, ws.fork(s1) as branch, branch(s1):
            bench.slow()
            capture.eager_break(lambda: None)

    def still_holding() -> None:
        with ws.capture():
            ws.acquire(BLOCK, N=large)

    return [at_once, holding, unscoped, in_branch, in_break, after_break, unjoined, unjoined_at_a_break, still_holding]


@scenario("d6", "P", "rollback", evidence="failure")
def capture_that_raises(bench: Bench) -> None:
    """A capture raises at different points: pool, lanes, lock count and leased set are as before."""
    ws, small, large = bench.ws, bench.mib(1), bench.mib(4)
    bench.reserve(ws, large, count=2)
    graph, copy = bench.graph(ws, 11, small)
    ws.synchronize()
    before = ws.snapshot()
    for body in _breakers(bench, ws):
        fails(body)
        require(ws.driver.current_stream() == bench.main.key, f"{body.__name__}: the caller's stream is not current")
        require(not ws.timeline.state.held, f"{body.__name__}: the thread still holds leases")
        after = ws.snapshot()
        require(
            (after.allocated, after.footprints, after.slabs) == (before.allocated, before.footprints, before.slabs),
            f"{body.__name__}: {after} is not {before}",
        )
        with ws.lease(BLOCK, N=large) as lease:
            bench.fill(lease.data, 2)
            graph.replay()
            bench.expect(bench.copy(lease.data), 2)
            bench.expect(copy, 11)
        bench.check()
    graph.release()
    ws.close()


@scenario("d6-beside", "P", "footprint", evidence="bytes")
def failing_capture_beside_a_good_one(bench: Bench) -> None:
    """Two captures of one lane are open at once; the one that fails takes nothing of the other's."""
    ws, small, large = bench.ws, bench.mib(1), bench.mib(4)
    s1, s2 = bench.streams(2)
    bench.reserve(ws, large, count=3)
    graphs = []

    def failing() -> None:
        with ws.on(s1), ws.capture(), ws.lease(BLOCK, N=small):
            with ws.on(s2):
                graphs.append(bench.graph(ws, 2, large))
            raise KeyError

    fails(failing)
    graph, copy = graphs[0]
    leases = [ws.acquire(BLOCK, N=large) for _ in range(3)]
    for value, lease in enumerate(leases, 31):
        bench.fill(lease.data, value)
    graph.replay()
    bench.expect(copy, 2)
    for value, lease in enumerate(leases, 31):
        bench.expect(bench.copy(lease.data), value)
    bench.check()
