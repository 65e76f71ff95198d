"""Breakable graphs: segments with eager breaks between them, one footprint from the first to the last."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, scene, write
from workspace import Lease, Workspace
from workspace.errors import CaptureError, FootprintBusy, GraphError
from workspace.graph import Graph
from workspace.holding import Footprint
from workspace.lane import Lane
from workspace.simulated import Device
from workspace.streams import Stream
from workspace.timeline import Timeline

BLOCKS = ["event_fenced", "per_stream"]


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_lease_lives_across_a_break(strategy: str) -> None:
    """Written in segment 1, read in segment 3; what the closure leases in between lies elsewhere, on replay too."""
    device, ws = scene(strategy, reserve=MIB)
    main, order = ws.stream("main"), list[str]()

    def between() -> None:
        order.append("break")
        with ws.lease(BYTES, N=4096) as own:
            device.launch("eager", writes=[own.x])

    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=4096) as lease:
        device.launch("segment 1", writes=[lease.x])
        capture.eager_break(between)
        device.launch("segment 3", reads=[lease.x])
    assert capture.graph.segments == 3
    for _ in range(3):
        capture.graph.replay(main)
    assert order == ["break"] * 4 and device.verdict() == "SAFE"
    capture.graph.release()
    assert ws.snapshot().footprints == {}


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("restored", [True, False])
def test_a_break_may_use_the_footprint(monkeypatch: pytest.MonkeyPatch, strategy: str, restored: bool) -> None:
    """It runs after the footprint's earlier uses on other streams, at the capture and at each replay."""
    if not restored:
        monkeypatch.setattr(Lane, "enter", lambda lane, stream: None)
    device, ws = scene(strategy, reserve=SLAB)
    main, other = ws.stream("main"), ws.stream("other")
    write(device, ws, "before", SLAB, other)
    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=SLAB) as lease:
        tensor = lease.x
        capture.eager_break(lambda: device.launch("break", writes=[tensor]))
    capture.graph.replay(other)
    capture.graph.replay(main)
    assert device.verdict() == ("SAFE" if restored else "UNSAFE")


@pytest.mark.parametrize("declared", [True, False])
def test_forks_in_a_break_count_as_uses_of_the_footprint(monkeypatch: pytest.MonkeyPatch, declared: bool) -> None:
    """A branch that is still at work when the break's stream goes on: the next owner waits for it."""
    if not declared:
        monkeypatch.setattr(Footprint, "declare", lambda held, stream: None)
    device, ws = scene(reserve=SLAB)
    main, aux = ws.stream("main"), ws.stream("aux")

    def between() -> None:
        with ws.fork(aux) as branch, branch(aux):
            device.launch("branch", reads=[tensor])
        device.launch("after the join", reads=[tensor], stream=aux.key)
        (footprint,) = [one for one in list(ws.timeline.state.held) if isinstance(one, Footprint)]
        footprint.declare(aux)

    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=SLAB) as lease:
        tensor = lease.x
        capture.eager_break(between)
    capture.graph.replay(main)
    capture.graph.release()
    write(device, ws, "next", SLAB, main)
    assert device.verdict() == ("SAFE" if declared else "UNSAFE")


def test_a_break_is_on_the_captures_own_stream_and_joined() -> None:
    """On another stream, or with a branch at large, it is refused."""
    _, ws = scene(reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture:
        with ws.on(aux), pytest.raises(CaptureError, match="another stream"):
            capture.eager_break(lambda: None)
        capture.eager_break(lambda: None)
    assert capture.graph.segments == 3


def test_segments_are_ordered_one_after_the_other() -> None:
    """A branch of the first segment and main of the second may share bytes: a replay runs them in turn."""
    device, ws = scene(reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture:
        with ws.fork(aux) as branch, branch(aux), ws.lease(BYTES, N=MIB) as lease:
            device.launch("branch", writes=[lease.x])
        capture.eager_break(lambda: None)
        with ws.fork(aux) as branch:
            with ws.lease(BYTES, N=MIB) as lease:
                device.launch("main", writes=[lease.x])
            with branch(aux):
                device.launch("nothing of it")
    for stream in (main, aux, main):
        capture.graph.replay(stream)
    assert device.verdict() == "SAFE" and capture.graph.footprint == MIB


def acquired(ws: Workspace, how: str, aux: Stream) -> Lease:
    """A lease of what a slab holds, used on this stream too, which is joined."""
    with ws.fork(aux) as branch:
        if how == "in a branch":
            with branch(aux):
                lease = ws.acquire(BYTES, N=SLAB)
        else:
            lease = ws.acquire(BYTES, N=SLAB)
    if how == "declared":
        lease.use(aux)
    return lease


def edge(device: Device, before: Stream, after: Stream) -> None:
    """One that the library does not see."""
    event = device.new_event()
    device.record(event, before.key)
    device.wait(event, after.key)


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("how", ["declared", "in a branch", "strict"])
@pytest.mark.parametrize("breaks", [1, 2])
@pytest.mark.parametrize("recording", ["lazy", "exact"])
@pytest.mark.parametrize("first", ["main", "new"])
def test_uses_of_a_segment_are_over_in_the_next(
    monkeypatch: pytest.MonkeyPatch, strategy: str, how: str, breaks: int, recording: str, first: str
) -> None:
    """Its stream captures no more: an event recorded on it would be one of outside. `first`: who leases, of the stream
    the capture began on and one that was in no segment before."""
    device, ws = scene(strategy, reserve=SLAB, strict_streams=how == "strict", recording=recording)
    main, aux, new = (ws.stream(name, communication=recording == "exact") for name in ("main", "aux", "new"))
    with ws.on(main), ws.capture() as capture:
        lease = acquired(ws, how, aux)
        device.launch("segment 1", writes=[lease.x])
        for _ in range(breaks):
            capture.eager_break(lambda: None)
        outside, record = list[int](), ws.driver.record
        monkeypatch.setattr(
            ws.driver,
            "record",
            lambda event, key: (ws.driver.capture_of(key) or outside.append(key), record(event, key)),
        )
        lease.release()
        edge(device, main, new)
        with ws.on(main if first == "main" else new), ws.lease(BYTES, N=SLAB) as lease:
            device.launch("next", writes=[lease.x])
        with ws.on(new), ws.lease(BYTES, N=SLAB) as lease:
            device.launch("after it", writes=[lease.x])
        edge(device, new, main)
        monkeypatch.undo()
    assert not outside
    for stream in (main, aux):
        capture.graph.replay(stream)
    assert device.verdict() == "SAFE" and capture.graph.footprint == SLAB


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("how", ["declared", "in a branch"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_stream_that_joins_a_later_segment_uses_the_lease_there(
    monkeypatch: pytest.MonkeyPatch, strategy: str, how: str, asked: bool
) -> None:
    """By an event that is none of the library's. Control: with all of its uses taken to be over, nothing is fenced."""
    if not asked:
        monkeypatch.setattr(Timeline, "takes_part", lambda *_: False)
    device, ws = scene(strategy, reserve=SLAB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture:
        lease = acquired(ws, how, aux)
        capture.eager_break(lambda: None)
        edge(device, main, aux)
        device.launch("segment 2", writes=[lease.x], stream=aux.key)
        lease.release()
        with ws.lease(BYTES, N=SLAB) as lease:
            device.launch("next", writes=[lease.x])
        edge(device, aux, main)
    capture.graph.replay(main)
    assert device.verdict() == ("SAFE" if asked else "UNSAFE")


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("how", ["declared", "in a branch"])
def test_a_lease_is_released_in_a_break(strategy: str, how: str) -> None:
    device, ws = scene(strategy, reserve=SLAB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture:
        lease = acquired(ws, how, aux)
        device.launch("segment 1", writes=[lease.x])
        capture.eager_break(lease.release)
        with ws.lease(BYTES, N=SLAB) as other:
            device.launch("segment 3", writes=[other.x])
        capture.eager_break(lambda: None)
    assert device.verdict() == "SAFE" and capture.graph.footprint == SLAB


def test_two_breakable_graphs_of_a_lane_do_not_interleave() -> None:
    """A replay begun inside another one's break is refused, in the capture too; of another lane it is served."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    inner: list[Graph] = []
    run: list[bool] = []

    def between() -> None:
        for graph in inner if run else ():
            graph.replay(main)

    graphs = {}
    for lane in ("main", "draft"):
        with ws.on(main), ws.capture(lane) as capture, ws.lease(BYTES, N=4096) as lease:
            device.launch("segment 1", writes=[lease.x])
            capture.eager_break(between)
            device.launch("segment 3", reads=[lease.x])
        graphs[lane] = capture.graph
    run.append(True)
    for lane in graphs:
        inner[:] = [graphs[lane]]
        with pytest.raises(FootprintBusy, match=lane) as caught:
            graphs[lane].replay(main)
        assert caught.value.fields["lane"] == lane
    with pytest.raises(FootprintBusy), ws.on(main), ws.capture("main") as capture, ws.lease(BYTES, N=4096):
        capture.eager_break(graphs["main"].replay)
    inner[:] = [graphs["draft"]]
    graphs["draft"]._segments[1] = lambda: None
    graphs["main"].replay(main)
    assert device.verdict() == "SAFE"


def test_a_graph_is_not_released_inside_its_own_replay() -> None:
    """Its later segments would be gone."""
    _, ws = scene(reserve=MIB)
    main = ws.stream("main")
    graphs: list[Graph] = []

    def between() -> None:
        for graph in graphs:
            graph.release()

    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=4096):
        capture.eager_break(between)
    graphs.append(capture.graph)
    with pytest.raises(GraphError, match="inside its own replay"):
        capture.graph.replay(main)
    graphs.clear()
    capture.graph.replay(main)
    capture.graph.release()


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("then", ["end", "another break"])
def test_a_capture_does_not_go_on_after_a_break_that_failed(strategy: str, then: str) -> None:
    """What follows would run now and be in no graph. The error names what the break raised; nothing is kept."""
    device, ws = scene(strategy, reserve=MIB)
    main = ws.stream("main")

    def between() -> None:
        raise KeyError("weights")

    for _ in range(2):
        with pytest.raises(CaptureError, match=r"break that failed: KeyError\('weights'\)") as caught:
            with ws.on(main), ws.capture() as capture:
                with ws.lease(BYTES, N=4096) as lease:
                    device.launch("segment 1", writes=[lease.x])
                with suppress(KeyError):
                    capture.eager_break(between)
                if then != "end":
                    capture.eager_break(lambda: None)
        assert isinstance(caught.value.__cause__, KeyError)
    assert not ws.timeline.captures and not ws.timeline.state.held and ws.snapshot().footprints == {}
    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=4096) as lease:
        device.launch("again", writes=[lease.x])
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"


def test_a_break_that_could_not_begin_has_failed() -> None:
    """The footprint is another replay's: no segment begins, and what follows is refused by that name."""
    _, ws = scene(reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    replaying: list[bool] = []

    def between() -> None:
        if not replaying:
            return
        with pytest.raises(CaptureError, match="break that failed: FootprintBusy"), ws.on(other), ws.capture() as later:
            with ws.lease(BYTES, N=4096):
                pass
            with suppress(FootprintBusy):
                later.eager_break(lambda: None)

    with ws.on(main), ws.capture() as capture:
        with ws.lease(BYTES, N=4096):
            pass
        capture.eager_break(between)
    replaying.append(True)
    capture.graph.replay(main)
    assert not ws.timeline.captures


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_break_that_raises_in_a_replay_ends_the_replay(strategy: str) -> None:
    """The footprint is free for the next replay, the stream is the caller's, and nothing stays held."""
    device, ws = scene(strategy, reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    fail: list[bool] = []

    def between() -> None:
        if fail:
            raise KeyError

    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=4096) as lease:
        device.launch("segment 1", writes=[lease.x])
        capture.eager_break(between)
        device.launch("segment 3", reads=[lease.x])
    fail.append(True)
    with pytest.raises(KeyError):
        capture.graph.replay(other)
    assert ws.driver.current_stream() == 0 and not ws.timeline.state.held
    fail.clear()
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"


def test_a_break_runs_with_the_replays_stream_current() -> None:
    """And the caller's stream is current again afterwards."""
    _, ws = scene(reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    seen: list[int] = []
    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=4096):
        capture.eager_break(lambda: seen.append(ws.driver.current_stream()))
    capture.graph.replay(other)
    assert seen == [main.key, other.key] and ws.driver.current_stream() == 0


def test_leases_of_a_break_are_eager() -> None:
    """They may be taken unreserved, outlive the break, and are on loan as any other."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    out: list[Lease] = []
    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=4096) as first:
        device.launch("first", writes=[first.x])
        capture.eager_break(lambda: out.append(ws.acquire(OTHER, N=4 * SLAB)))
    assert ws.snapshot().allocated == 4 * SLAB
    capture.graph.replay(main)
    assert ws.snapshot().allocated == 8 * SLAB
    for lease in out:
        lease.release()
    assert ws.snapshot().allocated == 4 * SLAB  # the first was held when the second segment began
    capture.graph.release()
    assert ws.snapshot().allocated == 0 and device.verdict() == "SAFE"


def test_a_lease_of_a_break_held_when_the_next_segment_begins_is_kept() -> None:
    """The next segment may read it at each replay, so that its bytes stay while the graph lives."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    out: list[Lease] = []

    def between() -> None:
        if not out:
            out.append(ws.acquire(OTHER, N=SLAB))
            device.launch("produce", writes=[out[0].y])

    with ws.on(main), ws.capture() as capture:
        capture.eager_break(between)
        device.launch("consume", reads=[out[0].y])
    out[0].release()
    write(device, ws, "eager", SLAB, ws.stream("other"))
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"


def test_the_held_list_of_a_footprint_is_the_threads() -> None:
    """What a break holds is what its thread holds: forks there find the footprint."""
    _, ws = scene(reserve=MIB)
    seen: list[list[object]] = []
    with ws.on(ws.stream("main")), ws.capture() as capture, ws.lease(BYTES, N=4096):
        capture.eager_break(lambda: seen.append(list(ws.timeline.state.held)))
    assert [type(one).__name__ for one in seen[0]] == ["Lease", "Footprint"]
