"""The clock check against reachability, over random programs of launches, events, host synchronisation and graphs."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workspace.simulated import Access, Device, SimulatedGraph

sys.path.insert(0, str(Path(__file__).parent))
from reachability import Accesses, Reachability

BYTES = 24
EVENTS = 4
NEVER = 1 << 60
spans = st.tuples(st.integers(0, BYTES - 1), st.integers(1, 10), st.booleans())
accesses = st.lists(spans, min_size=1, max_size=3)
streams = st.integers(0, 6)
free = st.integers(3, 6)
events = st.integers(0, EVENTS - 1)


def triples(chosen: list[tuple[int, int, bool]]) -> Accesses:
    return tuple((start, start + length, write) for start, length, write in chosen)


class ClockCheck(RuleBasedStateMachine):
    """Stream 0 is the default one, 1 and 2 synchronise with it implicitly, 3 to 6 are independent."""

    @initialize(ahead=st.sampled_from([0, NEVER]))
    def begin(self, ahead: int) -> None:
        self.device = Device(memory="virtual", ahead=ahead)
        self.base = self.device.alloc(BYTES)
        self.keys = [0, *(self.device.stream_id(self.device.new_raw_stream(blocking=True)) for _ in range(2))]
        self.keys += [self.device.new_stream() for _ in range(4)]
        self.events = [self.device.new_event() for _ in range(EVENTS)]
        self.captured_events = [self.device.new_event() for _ in range(EVENTS)]
        self.oracle = Reachability()
        self.graphs: list[tuple[SimulatedGraph, list[tuple[str, Accesses, int]]]] = []
        self.ends: dict[int, int] = {}
        self.count = 0

    def label(self) -> str:
        self.count += 1
        return f"op {self.count}"

    def enqueue(self, key: int, label: str, touched: Accesses) -> None:
        base = self.base.address
        reads = [(base + start, end - start) for start, end, write in touched if not write]
        writes = [(base + start, end - start) for start, end, write in touched if write]
        self.device.launch(label, reads, writes, stream=key)

    def implicit(self, stream: int) -> tuple[int, ...]:
        """What the legacy default stream and blocking streams wait for when something is enqueued on them."""
        others = {0: (1, 2), 1: (0,), 2: (0,)}.get(stream, ())
        return tuple(self.oracle.end(other) for other in others)

    @rule(stream=streams, chosen=accesses)
    def launch(self, stream: int, chosen: list[tuple[int, int, bool]]) -> None:
        label = self.label()
        self.oracle.launch(stream, label, triples(chosen), *self.implicit(stream))
        self.enqueue(self.keys[stream], label, triples(chosen))

    @rule(stream=free, event=events)
    def record(self, stream: int, event: int) -> None:
        self.oracle.record(event, stream)
        self.device.record(self.events[event], self.keys[stream])

    @rule(stream=free, event=events)
    def wait(self, stream: int, event: int) -> None:
        self.oracle.wait(event, stream)
        self.device.wait(self.events[event], self.keys[stream])

    @rule(stream=free, other=free, event=events)
    def hand_over(self, stream: int, other: int, event: int) -> None:
        self.record(stream, event)
        self.wait(other, event)

    @rule(event=events)
    def query(self, event: int) -> None:
        if self.device.query(self.events[event]):
            self.oracle.host_sees_event(event)

    @rule(event=events)
    def synchronize_event(self, event: int) -> None:
        self.device.synchronize_event(self.events[event])
        self.oracle.host_sees_event(event)

    @rule(stream=free)
    def synchronize_stream(self, stream: int) -> None:
        self.device.synchronize(self.keys[stream])
        self.oracle.host_sees_stream(stream)

    @rule()
    def new_stream(self) -> None:
        """A stream made later comes after what the host has seen, and nothing else."""
        self.keys[6] = self.device.new_stream()
        self.oracle.replace_stream(6)

    @precondition(lambda self: len(self.graphs) < 3)
    @rule(data=st.data(), length=st.integers(1, 6))
    def capture(self, data: st.DataObject, length: int) -> None:
        """A graph of two branches with random edges between them, joined at the end."""
        main, side = self.device.new_stream(), self.device.new_stream()
        fork, join, *cross = (self.device.new_event() for _ in range(4))
        inside = Reachability()
        nodes: list[tuple[str, Accesses, int]] = []
        self.device.begin_capture(main)
        self.device.record(fork, main)
        self.device.wait(fork, side)
        ends = {main: 0, side: 0}
        for _ in range(length):
            stream = data.draw(st.sampled_from([main, side]))
            touched = triples(data.draw(accesses))
            label = self.label()
            mask = inside.vertex(label, touched, ends[stream])
            nodes.append((label, touched, ends[stream]))
            ends[stream] |= mask
            self.enqueue(stream, label, touched)
            if data.draw(st.booleans()):
                other = side if stream == main else main
                event = data.draw(st.sampled_from(cross))
                self.device.record(event, stream)
                self.device.wait(event, other)
                ends[other] |= ends[stream]
        self.device.record(join, side)
        self.device.wait(join, main)
        self.graphs.append((self.device.end_capture(main), nodes))

    @precondition(lambda self: self.graphs)
    @rule(data=st.data(), stream=free)
    def replay(self, data: st.DataObject, stream: int) -> None:
        index = data.draw(st.integers(0, len(self.graphs) - 1))
        graph, nodes = self.graphs[index]
        start = self.oracle.vertex("start", (), self.oracle.end(stream), self.oracle._host, self.ends.get(index, 0))
        masks: list[int] = []
        for label, touched, before in nodes:
            earlier = [mask for number, mask in enumerate(masks) if before >> number & 1]
            masks.append(self.oracle.vertex(f"{graph.name}: {label}", touched, start, *earlier))
        self.oracle._last[stream] = self.ends[index] = self.oracle.vertex("end", (), start, *masks)
        graph.launch(self.keys[stream])

    @invariant()
    def each_racing_access_is_reported_and_no_other(self) -> None:
        if not hasattr(self, "oracle"):
            return
        expected = self.oracle.races()
        reported = {(name(race.first), name(race.second)) for race in self.device.races()}
        assert {coarse(pair) for pair in reported} == {coarse(pair) for pair in expected}
        assert {pair for pair in reported if inside(pair)} == {pair for pair in expected if inside(pair)}
        clean = "SAFE" if self.device.counters["launch"] else "UNKNOWN"
        assert self.device.verdict() == ("UNSAFE" if expected else clean)


def name(access: Access) -> str:
    return f"{access.graph}: {access.label}" if access.graph else access.label


def inside(pair: tuple[str, str]) -> bool:
    """Whether both happened in one graph; launches of one graph are ordered, so it was in one replay."""
    return ":" in pair[0] and pair[0].split(":")[0] == pair[1].split(":")[0]


def coarse(pair: tuple[str, str]) -> tuple[str, str]:
    """To the outside a replay is one operation: which of its nodes a report names is the report's choice."""
    return pair[0].split(":")[0], pair[1].split(":")[0]


ClockCheck.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_clock_check = ClockCheck.TestCase
