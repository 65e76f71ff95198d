"""``with ws.capture(...)``: a capture the library begins, full or divided by eager breaks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from workspace import argument
from workspace.capture import Capture
from workspace.errors import CaptureError
from workspace.graph import Graph
from workspace.holding import Footprint
from workspace.process import OfProcess

if TYPE_CHECKING:
    from workspace.driver import Graph as DriverGraph
    from workspace.provider import WorkspaceProvider
    from workspace.timeline import Timeline


class GraphCapture(OfProcess):
    """Captures the current stream's work into `graph`; made by `Workspace.capture`.

    Attributes
    ----------
    graph
        The `Graph`; it can be replayed once the ``with`` block has ended without an error.
    """

    def __init__(self, timeline: Timeline, provider: WorkspaceProvider, lane: str) -> None:
        self._timeline = timeline
        self._provider = provider
        self._lane = lane
        self._segments: list[DriverGraph | Callable[[], object]] = []
        self._capture: Capture | None = None
        self._broken: BaseException | None = None  # what an eager break raised
        self._entered = False
        self.graph = Graph(timeline, lane)

    def __enter__(self) -> GraphCapture:
        timeline = self._timeline
        if self._entered:
            raise CaptureError("a capture is entered twice", "call ws.capture(...) for each graph")
        self._entered = True
        with timeline.lock:
            timeline.ready()
            stream = timeline.current()
            if stream.capture is not None:
                raise CaptureError(f"{stream!r} is capturing already", "one capture at a time on a stream")
            capture = self._capture = Capture(timeline, stream, 0, foreign=False, lane=self._lane)
            capture.provider(self._provider)
        try:
            self._begin(capture)
        except BaseException:
            with timeline.lock:
                capture.close(None)
            raise
        return self

    def eager_break(self, fn: Callable[[], object]) -> None:
        """End the segment, run `fn` eagerly now and at each replay, and begin the next segment.

        What `fn` leases is outside the footprint; the footprint's bytes, which it may read and write, are the graph's
        until the replay ends. Branches of the capture must be joined before, and those of `fn` inside it.

        Raises `CaptureError` outside the capture's own stream.
        """
        argument.function(fn)
        capture, timeline = self._open(), self._timeline
        self._refuse_broken()
        if timeline.driver.current_stream() != capture.origin.key:
            raise CaptureError(
                f"eager_break on another stream than {capture.origin!r}, where the capture began",
                "join the branches first, and call it on the capture's own stream",
            )
        try:
            self._end_segment(capture)
            self._run_eagerly(fn, capture)
            self._segments.append(fn)
            self._begin(capture)
        except BaseException as error:
            self._broken = error  # nothing captures: what follows runs eagerly, and is in no graph
            raise

    def _run_eagerly(self, fn: Callable[[], object], capture: Capture) -> None:
        timeline = self._timeline
        held = Footprint(capture.origin, timeline.state.held)
        with timeline.lock:
            capture.enter_eager(capture.origin, self.graph)
        timeline.state.held[held] = None
        try:
            fn()
        finally:
            del timeline.state.held[held]
            with timeline.lock:
                capture.leave_eager(held)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        capture, timeline = self._open(), self._timeline
        try:
            if error is None:
                self._refuse_broken()
                capture.check_released()
                self._end_segment(capture)
        except BaseException:
            self._abort(capture)
            raise
        if error is not None:
            self._abort(capture)
            return
        with timeline.lock:
            pins = capture.close(self._segments)
            if pins is not None:
                self.graph.bind(pins, self._segments)
        self._capture = None
        self._segments = []  # the graph's, which lets go of what its breaks keep when it is released

    def _open(self) -> Capture:
        if self._capture is None:
            raise CaptureError("the capture is not open", "use it inside `with ws.capture(...) as capture`")
        return self._capture

    def _refuse_broken(self) -> None:
        """An eager break has failed, and its error did not end the capture's ``with`` block."""
        if self._broken is not None:
            raise CaptureError(
                f"the capture goes on after an eager break that failed: {self._broken!r}",
                "let the error leave the `with` block of the capture, and capture again",
            ) from self._broken

    def _begin(self, capture: Capture) -> None:
        timeline = self._timeline
        with timeline.lock:
            # Before each segment: one after a break may use what the break leased and still holds.
            capture.keep_held()
            timeline.opening = capture
            try:
                identity = timeline.call(timeline.driver.begin_capture, capture.origin.key, self._shared_pool())
                capture.identity = identity
                timeline.captures[identity] = capture
                timeline.refresh()
            finally:
                timeline.opening = None

    def _shared_pool(self) -> DriverGraph | None:
        own = next((segment for segment in reversed(self._segments) if not callable(segment)), None)
        if own is not None or self._capture is None:
            return own
        return next((shared for lane in self._capture.lanes if (shared := lane.shared()) is not None), None)

    def _end_segment(self, capture: Capture) -> None:
        timeline = self._timeline
        with timeline.lock:
            try:
                segment = timeline.call(timeline.driver.end_capture, capture.origin.key)
            finally:
                if not timeline.call(timeline.driver.capture_of, capture.origin.key):
                    timeline.captures.pop(capture.identity, None)
                    timeline.refresh()
                    capture.identity = 0
            capture.segment_ended()
            self._segments.append(segment)

    def _abort(self, capture: Capture) -> None:
        timeline = self._timeline
        self._capture = self._broken = None
        with timeline.lock:
            try:
                if capture.identity and timeline.call(timeline.driver.capture_of, capture.origin.key):
                    timeline.call(timeline.driver.abort_capture, capture.origin.key)
            finally:
                capture.close(None)
        for segment in self._segments:
            if not callable(segment):
                timeline.call(segment.reset)
        self._segments = []
