"""Events of the user that feed the clocks: for engines with record and wait of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workspace.errors import CaptureError
from workspace.process import OfProcess
from workspace.streams import CURRENT, Stream

if TYPE_CHECKING:
    from workspace.timeline import Timeline


class WorkspaceEvent(OfProcess):
    """A drop-in event, made by `Workspace.event`; order it creates is known to every workspace of the device."""

    __slots__ = ("_event", "_recorded_in", "_segment", "_timeline")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        with timeline.lock:
            self._event = timeline.new_event()
        self._recorded_in: Stream | None = None
        self._segment = 0

    def record(self, stream: object = CURRENT) -> None:
        """Mark the point all work enqueued so far on a stream (omitted: the current one) leads to."""
        timeline = self._timeline
        with timeline.lock:
            target = self._stream(stream)
            timeline.record(target, self._event)
            self._recorded_in = target
            self._segment = target.capture.segment if target.capture is not None else 0

    def wait(self, stream: object = CURRENT) -> None:
        """Make later work on a stream (omitted: the current one) wait; without a record before, nothing happens."""
        timeline = self._timeline
        with timeline.lock:
            if self._recorded_in is None:
                return
            target = self._waiter(stream)
            if target.capture is not None and self._recorded_in.capture is None:
                self._refuse_unless_complete(target)
                return
            if target.capture is None or target.capture.segment == self._segment:
                timeline.wait(self._event, target)
            # else: the whole of an earlier segment comes first at each replay, and its event is over

    def query(self) -> bool:
        """Whether the recorded work is complete; if so the host knows, and may reuse what it ordered."""
        timeline = self._timeline
        with timeline.lock:
            self._refuse_captured("query()")
            covered = self._event.covered
            done = timeline.call(timeline.driver.done, self._event.handle)
            if done:
                timeline.clocks.complete(covered)
            return done

    def synchronize(self) -> None:
        """Block the host until the recorded work is complete."""
        with self._timeline.lock:
            self._refuse_captured("synchronize()")
            covered = self._event.covered
        self._timeline.call(self._timeline.driver.synchronize_event, self._event.handle)
        with self._timeline.lock:
            # Another thread may have recorded anew meanwhile: which of the two records was awaited is then unknown.
            if self._event.covered is covered:
                self._timeline.clocks.complete(covered)

    def _refuse_captured(self, what: str) -> None:
        if self._recorded_in is not None and self._recorded_in.capture is not None:
            raise CaptureError(
                f"{what} of an event recorded in a capture: it names a node of the graph, not work under way",
                "record an event after the replay",
            )

    def _stream(self, stream: object) -> Stream:
        timeline = self._timeline
        return timeline.current() if stream is CURRENT else timeline.inside(timeline.of(stream))

    def _refuse_unless_complete(self, target: Stream) -> None:
        """Order of before a capture holds inside it only where the host has seen the work complete."""
        host = self._timeline.clocks.host
        if any(host.get(used, 0) < epoch for used, epoch in self._event.covered.items()):
            raise CaptureError(
                f"{target!r} waits, inside its capture, for an event recorded outside",
                "wait before the capture begins: the replay comes after what its stream waited for",
            )

    def _waiter(self, stream: object) -> Stream:
        target = self._stream(stream)
        capture = self._recorded_in.capture if self._recorded_in is not None else None
        if capture is None or target.capture is capture:
            return target
        if not capture.open:
            raise CaptureError("an event recorded in a capture is waited for outside it", "record one outside")
        if target.capture is not None:
            raise CaptureError(
                f"{target!r} waits for an event that was recorded on {self._recorded_in!r}, in another capture",
                "capture both on streams of one: order between two graphs is order between their replays",
            )
        if capture.segment != self._segment:
            raise CaptureError(
                f"{target!r} waits for an event of before an eager break, which no longer takes it into the capture",
                "record the event again after the break",
            )
        # Waiting for a captured event is how a stream joins the capture.
        return self._timeline.into_capture((target,), capture)[0]
