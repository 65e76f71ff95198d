"""d8 and d9: graphs with eager breaks."""

from __future__ import annotations

from workspace.capturing import GraphCapture
from workspace.errors import CaptureError, FootprintBusy, GraphError
from workspace.graph import Graph
from workspace.testing.bench import BLOCK, OTHER, Bench, Copy
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario
from workspace.workspace import Workspace


@scenario("d8", "P", "footprint", evidence="bytes")
def lease_across_an_eager_break(bench: Bench) -> None:
    """Filled in the first segment, read in the third; the closure between them leases the same size each time."""
    ws, nbytes = bench.ws, bench.mib(4)
    ws.declare(BLOCK, N=nbytes, lane="main")
    ws.declare(OTHER, N=nbytes)
    ws.reserve()
    runs: list[Copy] = []

    def eager() -> None:
        # Another size each time, so that the pool is searched and no block is waiting for this very request.
        with ws.lease(OTHER, N=nbytes - 256 * len(runs)) as lease:
            bench.fill(lease.data, 82)
            runs.append(bench.copy(lease.data))

    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 81)
        capture.eager_break(eager)
        copy = bench.copy(lease.data)
    require(capture.graph.segments == 3, f"{capture.graph.segments} segments instead of 3")
    for turn in range(3):
        capture.graph.replay()
        bench.expect(copy, 81)
        bench.expect(runs[-1], 82)
        require(len(runs) == turn + 2, "the closure does not run once for each replay")
        bench.check()


@scenario("d8-fork-in-break", "P", "join")
def break_that_forks(bench: Bench) -> None:
    """The closure reads and rewrites the footprint on a branch, late; the next segment and replay come after."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes)
    reads: list[Copy] = []
    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes) as lease:
        data = bench.tensor(lease.data)
        bench.fill(data, 81)

        def eager() -> None:
            with ws.fork(s1) as branch, branch(s1):
                bench.slow()
                reads.append(bench.copy(data))
                bench.fill(data, 83)

        capture.eager_break(eager)
        copy = bench.copy(data)
    for _ in range(2):
        capture.graph.replay()
        bench.expect(reads[-1], 81)
        bench.expect(copy, 83)
    bench.check()


@scenario("d8-break-raises", "P", "lane.enter", "lane.leave")
def break_that_raises_at_a_replay(bench: Bench) -> None:
    """A closure raises at one replay: the lane is free again, and its last use is the part that ran."""
    ws, nbytes = bench.ws, bench.mib(4)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes)
    fail = [False]
    reads: list[Copy] = []

    def eager() -> None:
        if fail[0]:
            raise KeyError("eager break")

    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 81)
        bench.slow()
        reads.append(bench.copy(lease.data))
        capture.eager_break(eager)
        copy = bench.copy(lease.data)
    other, right = bench.graph(ws, 84, nbytes)
    fail[0] = True
    try:
        capture.graph.replay(s1)
        require(False, "the closure's error does not arrive")
    except KeyError:
        pass
    require(ws.driver.current_stream() == bench.main.key, "the caller's stream is not current")
    other.replay()
    bench.expect(reads[0], 81)
    bench.expect(right, 84)
    bench.check()
    fail[0] = False
    capture.graph.replay(s1)
    bench.expect(copy, 81)
    bench.check()


def _breakable(
    bench: Bench, ws: Workspace, value: int, nbytes: int, lane: str, between: list[Graph]
) -> tuple[GraphCapture, Copy]:
    def replays() -> None:
        for graph in between:
            graph.replay()

    with ws.capture(lane=lane) as capture, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, value)
        capture.eager_break(replays)
        copy = bench.copy(lease.data)
    return capture, copy


@scenario("d9", "P", "lane.begin", evidence="bytes")
def breakable_graphs_in_turn(bench: Bench) -> None:
    """A's break replays B, whose break replays C: refused in one lane, right in three."""
    ws, nbytes = bench.ws, bench.mib(2)
    for lane in ("main", "one", "two", "three"):
        bench.reserve(ws, nbytes, lane=lane)
    inner: list[Graph] = []
    first, copy = _breakable(bench, ws, 91, nbytes, "main", inner)
    second, other = _breakable(bench, ws, 92, nbytes, "main", [])
    inner.append(second.graph)
    try:
        first.graph.replay()
    except FootprintBusy as error:
        require("lane" in str(error), f"the refusal does not name lanes: {error}")
    else:
        bench.expect(copy, 91)
        bench.check()
    inner.clear()
    first.graph.replay()
    second.graph.replay()
    bench.expect(copy, 91)
    bench.expect(other, 92)
    bench.check()
    chain: list[Graph] = []
    copies = []
    for number, lane in enumerate(("one", "two", "three"), 1):
        made, late = _breakable(bench, ws, 90 + number, nbytes, lane, list(chain))
        chain = [made.graph]
        copies.append(late)
    for _ in range(2):
        chain[0].replay()
        for number, late in enumerate(copies, 1):
            bench.expect(late, 90 + number)
        bench.check()


@scenario("d9-capture-in-break", "P", "footprint", evidence="bytes")
def capture_inside_a_break(bench: Bench) -> None:
    """A closure captures a graph of another lane; both own their bytes."""
    ws, nbytes = bench.ws, bench.mib(2)
    bench.reserve(ws, nbytes, lane="main")
    bench.reserve(ws, nbytes, lane="inner")
    made: list[tuple[Graph, Copy]] = []

    def eager() -> None:
        if not made:
            made.append(bench.graph(ws, 93, nbytes, "inner"))

    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 91)
        capture.eager_break(eager)
        copy = bench.copy(lease.data)
    with ws.lease(BLOCK, N=nbytes) as one, ws.lease(OTHER, N=nbytes) as two:
        bench.fill(one.data, 1)
        bench.fill(two.data, 2)
        capture.graph.replay()
        made[0][0].replay()
        bench.expect(copy, 91)
        bench.expect(made[0][1], 93)
        bench.expect(bench.copy(one.data), 1)
        bench.expect(bench.copy(two.data), 2)
        bench.check()


@scenario("d9-refused", "R")
def graphs_out_of_order(bench: Bench) -> None:
    """Replays before the end, after the release, and inside a capture; a capture inside a capture."""
    ws, nbytes = bench.ws, bench.mib(1)
    bench.reserve(ws, nbytes)
    graph, copy = bench.graph(ws, 1, nbytes)
    with ws.capture() as capture:
        with refused(GraphError):
            capture.graph.replay()
        with refused(GraphError):
            graph.replay()
        with refused(CaptureError), ws.capture():
            pass
    graph.replay()
    bench.expect(copy, 1)
    bench.check()
    graph.release()
    graph.release()
    with refused(GraphError):
        graph.replay()
    with refused(GraphError):
        ws.adopt()


@scenario("d9-itself", "R")
def graph_inside_its_own_replay(bench: Bench) -> None:
    """A break replays its own graph, directly or through another's break, or releases it: refused, and usable after."""
    ws, nbytes = bench.ws, bench.mib(1)
    bench.reserve(ws, nbytes, lane="main")
    bench.reserve(ws, nbytes, lane="other")
    itself: list[Graph] = []
    breakable, copy = _breakable(bench, ws, 2, nbytes, "main", itself)
    around, _ = _breakable(bench, ws, 3, nbytes, "other", [breakable.graph])
    for inner in (breakable.graph, around.graph):
        itself[:] = [inner]
        with refused(FootprintBusy):
            breakable.graph.replay()
    itself.clear()
    breakable.graph.replay()
    bench.expect(copy, 2)
    bench.check()
    released: list[Graph] = []

    def release() -> None:
        for graph in released:
            graph.release()

    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 4)
        capture.eager_break(release)
        late = bench.copy(lease.data)
    released.append(capture.graph)
    with refused(GraphError):
        capture.graph.replay()
    released[:] = [breakable.graph]
    capture.graph.replay()
    bench.expect(late, 4)
    bench.check()
