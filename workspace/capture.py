"""Captures: child timelines whose leases make a graph's footprint."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workspace.errors import CaptureError
from workspace.holding import Pinnable
from workspace.lane import Lane, Mark, end_use
from workspace.pins import Pins
from workspace.streams import Stream

if TYPE_CHECKING:
    from workspace.clocks import Seen
    from workspace.driver import Graph as DriverGraph
    from workspace.graph import Graph
    from workspace.holding import Footprint
    from workspace.lease import Lease
    from workspace.provider import WorkspaceProvider
    from workspace.timeline import Timeline

_SERIAL = itertools.count(1)


class Capture:
    """One capture, open, closed or failed; a breakable one spans all its segments.

    Attributes
    ----------
    origin
        The stream the capture began on, as it is outside.
    foreign
        The library did not begin it, so that its graph may be replayed without the library's knowledge.
    segment
        Number of eager breaks so far.
    lanes
        Footprints its leases come from.
    memory
        Tensors of the framework's allocator whose use in here was declared: kept as long as the graph.
    kept
        Leases of before the capture that the capturing thread held when it began: the graph may use their bytes at
        each replay, so a release returns them only after the graph is gone.
    """

    def __init__(self, timeline: Timeline, origin: Stream, identity: int, *, foreign: bool, lane: str = "") -> None:
        self.timeline = timeline
        self.origin = origin
        self.identity = identity
        self.foreign = foreign
        self.serial = next(_SERIAL)
        self.name = f"capture {self.serial}"
        self.lane_name = lane or f"foreign capture {self.serial}"
        self.open = True
        self.segment = 0
        self.lanes: list[Lane] = []
        self._marks: list[Mark] = []
        self.providers: dict[WorkspaceProvider, WorkspaceProvider] = {}
        self.leases: list[Lease] = []
        self.kept: list[Pinnable] = []
        self.memory: list[Any] = []
        self.adopted: Graph | None = None
        self._streams: dict[int, Stream] = {}
        self._over: Seen | None = None  # what the segments before have done

    # -- streams ---------------------------------------------------------------------------------------------
    def stream(self, stream: Stream) -> Stream:
        """The stream's self in here."""
        found = self._streams.get(stream.key)
        if found is None:
            found = self._streams[stream.key] = self.timeline.captured_self(stream, self)
            if self._over is not None:
                self.timeline.clocks.wait(found.id, self._over)
        return found

    def streams(self) -> list[Stream]:
        """The selves of the streams that have taken part so far."""
        return list(self._streams.values())

    def segment_ended(self) -> None:
        """Segments run one after the other on one stream: each comes after the whole of the one before."""
        self.segment += 1
        self._over = self.timeline.clocks.barrier(stream.id for stream in self._streams.values())
        for stream in self._streams.values():
            stream.last = None

    def keep_held(self) -> None:
        """Pin the eager leases the calling thread holds: what is captured now may use their bytes at each replay."""
        for lease in self.timeline.state.held.holdings():
            if isinstance(lease, Pinnable) and lease.stream.capture is None and lease not in self.kept:
                lease.pin()
                self.kept.append(lease)

    # -- bytes -----------------------------------------------------------------------------------------------
    def provider(self, parent: WorkspaceProvider) -> WorkspaceProvider:
        """The provider that places this capture's leases: same strategy, bytes of the lane."""
        found = self.providers.get(parent)
        if found is None:
            lane = parent.lane(self.lane_name, complete_only=self.raw)
            if lane is not None:
                self._marks.append(lane.begin_capture())
                self.lanes.append(lane)
            found = self.providers[parent] = parent.inside(lane)
        return found

    def adopt(self, lane: str) -> Graph:
        """The graph of a foreign capture, which its author promises to replay through the library only."""
        from workspace.graph import Graph

        if self.adopted is None:
            self.adopted = Graph(self.timeline, lane)
            if not self.lanes:
                self.lane_name = lane
        return self.adopted

    @property
    def raw(self) -> bool:
        """Whether the graph may be replayed without the library's knowledge."""
        return self.foreign and self.adopted is None

    def enter_eager(self, stream: Stream, graph: Graph) -> None:
        """An eager break is about to run: it may touch the footprint, so it holds it as a replay does."""
        begun: list[Lane] = []
        try:
            for lane in self.lanes:
                lane.begin(graph)
                begun.append(lane)
                lane.enter(stream)
        except BaseException:
            for lane in begun:
                lane.end()
            raise

    def leave_eager(self, held: Footprint) -> None:
        """The break has run: it is the footprint's last use."""
        failed = end_use(self.lanes, held.stamped(self.timeline))
        if failed is not None:
            raise failed

    # -- end -------------------------------------------------------------------------------------------------
    def check_released(self) -> None:
        """Raise `CaptureError` if a lease taken in here is still held: the lane's next graph would overwrite it."""
        if self.leases:
            owners = sorted({lease.owner for lease in self.leases})
            raise CaptureError(
                f"{self.name} ends while it holds {', '.join(owners)}",
                "release leases before the capture ends; lease outputs that outlive a replay before it begins",
                owners=owners,
            )

    def close(self, segments: list[DriverGraph | Callable[[], object]] | None) -> Pins | None:
        """The capture has ended; with None it failed, and all bookkeeping returns to before.

        Returns what the graph pins. Called with the timeline's lock held.
        """
        self.open = False
        self.timeline.captures.pop(self.identity, None)
        self.timeline.refresh()
        pins = None
        if segments is not None:
            pins = Pins(self)
            pins.watch([segment for segment in segments if not callable(segment)])
        else:
            for lane, mark in zip(self.lanes, self._marks, strict=True):
                lane.rollback(mark)
            for lease in self.kept:
                lease.unpin()
        for lease in list(self.leases):
            lease.outlived_capture()
        for lane in self.lanes:
            lane.captures -= 1
            lane.give_back_if_unused()
        for provider in self.providers.values():
            provider.close()
        self.timeline.forget(list(self._streams.values()))
        self._streams = {}
        if pins is not None and self.adopted is not None:
            self.adopted.bind(pins, segments or [])
        return pins
