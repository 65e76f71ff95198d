"""Random programs of streams, events, host waits and captures, for the clocks and for the oracle at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.workspace.order import Order, Vertex
from workspace.clocks import Clocks, Seen

EAGER = 3
EVENTS = 2
streams = st.integers(0, EAGER + 1)
events = st.integers(0, EVENTS - 1)
Between = Callable[[], object]
SEARCH = settings(derandomize=True, deadline=None, max_examples=120, stateful_step_count=40, database=None)


class Framework:
    """Clocks, and the order in which the timeline calls them and the device.

    `between` is what another thread does between the two calls.
    """

    clocks_type: type[Clocks] = Clocks

    def __init__(self) -> None:
        self.clocks = self.clocks_type()

    def captured(self, eager: int) -> int:
        """The id of a stream inside a capture."""
        return self.clocks.add()

    def record(self, stream: int, device: Between, between: Between, before: Seen) -> Seen:
        covered = self.clocks.record(stream)
        between()
        device()
        return covered

    def wait(self, stream: int, covered: Seen, device: Between, between: Between) -> None:
        between()
        device()
        self.clocks.wait(stream, covered)

    def synchronize(self, streams: Iterable[int], device: Between, between: Between) -> None:
        covered = [self.clocks.record(stream) for stream in streams]
        device()
        between()
        for seen in covered:
            self.clocks.complete(seen)
        self.clocks.settle()

    def query(self, covered: Seen, done: bool) -> None:
        if done:
            self.clocks.complete(covered)


@attrs.define
class Use:
    """A use: its place in the graph, and the stamp a release gave it (epoch 0: not released yet)."""

    vertex: Vertex
    stream: int
    epoch: int = 0
    exact: bool = True
    """Whether nothing happened on its stream between the use and its stamp, so that the clocks lose nothing."""


class ClocksMachine(RuleBasedStateMachine):
    """Streams 0 to 2 are eager; while a capture is open, 3 and 4 are the selves of 0 and 1 in it."""

    framework: type[Framework] = Framework

    def __init__(self) -> None:
        super().__init__()
        self.tested = self.framework()
        self.order = Order()
        self.ids = [self.tested.clocks.add() for _ in range(EAGER)]
        self.names = list(range(EAGER))
        self.uses: list[Use] = []
        self.covered: dict[tuple[bool, int], Seen] = {}
        self.recorded: dict[tuple[bool, int], Vertex] = {}
        self.serial = EAGER

    # -- what the rules share --------------------------------------------------------------------------------
    def number(self, stream: int) -> int:
        return stream if stream < len(self.ids) else stream - EAGER

    def enqueue(self, stream: int) -> Use:
        use = Use(self.order.enqueue(self.names[stream]), self.ids[stream])
        self.uses.append(use)
        return use

    def stamp(self, use: Use) -> None:
        use.epoch = self.tested.clocks.of[use.stream].epoch

    def interleaved(self, stream: int, yes: bool) -> Between:
        """Another thread uses the stream, and releases, in the middle of a call."""

        def act() -> None:
            if yes:
                use = self.enqueue(stream)
                self.stamp(use)
                use.exact = False
            self.sound()

        return act

    # -- rules -----------------------------------------------------------------------------------------------
    @rule(stream=streams, late=st.booleans())
    def use(self, stream: int, late: bool) -> None:
        use = self.enqueue(self.number(stream))
        if not late:
            self.stamp(use)

    @precondition(lambda self: any(not use.epoch for use in self.uses))
    @rule()
    def release(self) -> None:
        """The oldest use that waits for its release is stamped; records in between make the stamp later."""
        use = next(use for use in self.uses if not use.epoch)
        use.exact = False
        self.stamp(use)

    @rule(stream=streams, event=events, interleave=st.booleans())
    def record(self, stream: int, event: int, interleave: bool) -> None:
        stream = self.number(stream)
        key = stream >= EAGER, event

        def device() -> None:
            self.recorded[key] = self.order.enqueue(self.names[stream])

        before = self.covered.get(key, {})
        self.covered[key] = self.tested.record(self.ids[stream], device, self.interleaved(stream, interleave), before)

    @rule(stream=streams, event=events, interleave=st.booleans())
    def wait(self, stream: int, event: int, interleave: bool) -> None:
        """Without a record before, nothing happens."""
        stream = self.number(stream)
        key = stream >= EAGER, event

        def device() -> None:
            if key in self.recorded:
                self.order.enqueue(self.names[stream], self.recorded[key])

        covered = self.covered.get(key, {})
        self.tested.wait(self.ids[stream], covered, device, self.interleaved(stream, interleave))

    @rule(first=streams, second=streams, event=events)
    def edge(self, first: int, second: int, event: int) -> None:
        """A record and its wait at once, so that chains of edges are frequent."""
        first, second = self.number(first), self.number(second)
        if (first >= EAGER) == (second >= EAGER):
            self.record(stream=first, event=event, interleave=False)
            self.wait(stream=second, event=event, interleave=False)

    @rule(event=events, done=st.booleans())
    def query(self, event: int, done: bool) -> None:
        key = False, event
        if done and key in self.recorded:
            self.order.host_saw(self.recorded[key])
        self.tested.query(self.covered.get(key, {}), done)

    @rule(stream=st.integers(0, EAGER - 1), everything=st.booleans(), interleave=st.booleans())
    def synchronize(self, stream: int, everything: bool, interleave: bool) -> None:
        chosen = range(EAGER) if everything else [stream]

        def device() -> None:
            for one in chosen:
                self.order.host_saw(self.order.enqueue(self.names[one]))

        self.tested.synchronize([self.ids[one] for one in chosen], device, self.interleaved(stream, interleave))

    @precondition(lambda self: len(self.ids) == EAGER)
    @rule()
    def begin_capture(self) -> None:
        for eager in range(2):
            self.ids.append(self.tested.captured(self.ids[eager]))
            self.names.append(self.serial)
            self.serial += 1

    @precondition(lambda self: len(self.ids) > EAGER)
    @rule()
    def segment_ends(self) -> None:
        """An eager break: both streams go on after everything so far on both."""
        ends = [self.order.enqueue(name) for name in self.names[EAGER:]]
        for name in self.names[EAGER:]:
            self.order.enqueue(name, *ends)
        self.tested.clocks.barrier(self.ids[EAGER:])

    @precondition(lambda self: len(self.ids) > EAGER)
    @rule()
    def end_capture(self) -> None:
        gone = self.ids[EAGER:]
        self.uses = [use for use in self.uses if use.stream not in gone]
        self.tested.clocks.forget(gone)
        del self.ids[EAGER:], self.names[EAGER:]
        for event in range(EVENTS):
            self.covered.pop((True, event), None)
            self.recorded.pop((True, event), None)

    # -- the laws --------------------------------------------------------------------------------------------
    def sound(self) -> None:
        """The clocks never claim an order that is not there."""
        for name, stream in zip(self.names, self.ids, strict=True):
            before = self.order.preceding(name)
            for use in self.uses:
                if use.epoch and self.tested.clocks.ordered(stream, use.stream, use.epoch):
                    assert use.vertex in before, f"claimed: {use} before stream {stream}"

    @invariant()
    def sound_and_complete(self) -> None:
        """Where a use was stamped at once, the clocks also know every order there is."""
        self.sound()
        for name, stream in zip(self.names, self.ids, strict=True):
            before = self.order.preceding(name)
            for use in self.uses:
                if use.epoch and use.exact and use.vertex in before:
                    assert self.tested.clocks.ordered(stream, use.stream, use.epoch), f"unknown: {use}, {stream}"
