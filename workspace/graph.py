"""Graphs: lists of segments with one footprint, replayed as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from workspace.errors import DriverError, GraphError, ProcessError, SleepError, WorkspaceError
from workspace.holding import Footprint
from workspace.lane import end_use
from workspace.process import OfProcess
from workspace.streams import CURRENT, Stream

if TYPE_CHECKING:
    from workspace.driver import Graph as DriverGraph
    from workspace.pins import Pins
    from workspace.timeline import Timeline


class Graph(OfProcess):
    """A captured graph: one segment when it is full, more when eager breaks divide it.

    Made by `Workspace.capture` or, for a capture begun elsewhere, by `Workspace.adopt`.

    Attributes
    ----------
    running
        Replays that have begun and not ended, in any thread.
    refusal
        Why it can never be replayed again though nobody released it: error, problem and remedy.
    """

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline = timeline
        self.name = name
        self.released = False
        self.pins: Pins | None = None
        self.running = 0
        self.refusal: tuple[type[WorkspaceError], str, str] | None = None
        self._segments: list[DriverGraph | Callable[[], object]] = []
        self._breaks = False

    def __repr__(self) -> str:
        return f"<graph {self.name}, {self.segments} segments, footprint {self.footprint} bytes>"

    @property
    def footprint(self) -> int:
        """Bytes of the lanes it belongs to, which other graphs of the lane share."""
        return sum(lane.nbytes for lane in self.pins.lanes) if self.pins else 0

    def driver_graph(self) -> DriverGraph | None:
        """One of its graph segments; None when it is released or has none."""
        return next((segment for segment in self._segments if not callable(segment)), None)

    @property
    def segments(self) -> int:
        """Number of graph segments and eager breaks."""
        return len(self._segments)

    def bind(self, pins: Pins, segments: list[DriverGraph | Callable[[], object]]) -> None:
        """Take over what a closed capture made."""
        self.pins = pins
        pins.graph = weakref.ref(self)
        for lane in pins.lanes:
            lane.members.add(self)
        self._segments = segments
        self._breaks = any(callable(segment) for segment in segments)

    def replay(self, stream: object = CURRENT) -> None:
        """Enqueue the graph, ordered after the last uses of its footprint; then it is their last use.

        Parameters
        ----------
        stream
            Where to; omitted, the caller's current stream. Eager breaks run with this stream current.

        Raises
        ------
        GraphError
            The graph is released, its capture has not ended, or it is replayed inside a capture; or it was captured
            before a sleep that gave its bytes away.
        SleepError
            The workspace is asleep.
        FootprintBusy
            Another replay of the lane has begun and not ended.
        """
        timeline = self.timeline
        with timeline.lock:
            if timeline.finished or timeline.deferred:
                timeline.drain()
            target = self._target(stream)
            self._begin(target)
        held = Footprint(target, timeline.state.held)
        try:
            self._run(target, held)
        finally:
            with timeline.lock:
                self._end(held)

    def _begin(self, target: Stream) -> None:
        assert self.pins is not None
        begun = []
        try:
            for lane in self.pins.lanes:
                lane.begin(self)
                begun.append(lane)
                lane.enter(target)
        except BaseException:
            for lane in begun:
                lane.end()
            raise
        self.running += 1

    def _end(self, held: Footprint) -> None:
        assert self.pins is not None
        self.running -= 1
        uses = held.stamped(self.timeline)
        failed = end_use(self.pins.lanes, uses)
        for lease in self.pins.kept:
            try:
                lease.replayed(uses, self.timeline)
            except BaseException as error:  # the others hear of it all the same
                failed = failed or error
        if failed is not None:
            raise failed

    def _target(self, stream: object) -> Stream:
        if self.timeline.refusal is not None:
            raise self.timeline.refusal
        if self.refusal is not None:
            kind, problem, remedy = self.refusal
            raise kind(f"graph {self.name!r} {problem}", remedy)
        if self.pins is not None and self.pins.sleeping:
            who = ", ".join(self.pins.sleeping.values())
            raise SleepError(f"graph {self.name!r} is replayed while {who} sleeps", "call wake() of it first")
        if self.released or self.pins is None:
            state = "is released" if self.released else "has not been captured to its end"
            raise GraphError(f"graph {self.name!r} {state}", "replay between the end of the capture and release()")
        target = self.timeline.current() if stream is CURRENT else self.timeline.of(stream)
        if target.capture is not None or self.timeline.call(self.timeline.driver.capture_of, target.key):
            raise GraphError(
                f"graph {self.name!r} is replayed on {target!r}, which is capturing", "replay outside captures"
            )
        return target

    def _run(self, target: Stream, held: Footprint) -> None:
        key = target.key
        if not self._breaks:
            try:
                for segment in self._segments:
                    segment.launch(key)  # type: ignore[union-attr]
            except DriverError as error:  # `Timeline.call` without the call
                self.timeline.note(error)
                raise
            return
        driver, state = self.timeline.driver, self.timeline.state
        before = driver.current_stream()
        if before != key:
            driver.set_stream(key)
        state.held[held] = None
        try:
            for segment in self._segments:
                if callable(segment):
                    segment()
                else:
                    self.timeline.call(segment.launch, key)
        finally:
            del state.held[held]
            if before != key:
                driver.set_stream(before)

    def release(self) -> None:
        """Destroy the graph; its bytes return to the pool with the last graph of the lane. Twice is no error."""
        with self.timeline.lock:
            if self.released:
                return
            if isinstance(self.timeline.refusal, ProcessError):
                raise self.timeline.refusal
            if self.pins is not None and any(lane.replaying is self for lane in self.pins.lanes):
                raise GraphError(f"graph {self.name!r} is released inside its own replay", "release it afterwards")
            self.released = True
            segments, self._segments = self._segments, []
        for segment in segments:
            if not callable(segment):
                self.timeline.call(segment.reset)
        with self.timeline.lock:
            self.timeline.settle_releases()
