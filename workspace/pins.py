"""What a live graph pins: its lanes' footprints, and the leases of before the capture that it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workspace.driver import Graph as DriverGraph
    from workspace.holding import Pinnable
    from workspace.lane import Lane
    from workspace.timeline import Timeline


class Pins:
    """Kept until every segment of a graph is destroyed; holds no graph, so that dropping one destroys it.

    Attributes
    ----------
    raw
        The graph may have been replayed without the library's knowledge. Such replays may be under way on any
        stream, and only the device's idleness proves them over.
    """

    def __init__(self, timeline: Timeline, lanes: list[Lane], kept: list[Pinnable], *, raw: bool) -> None:
        self.timeline = timeline
        self.lanes = list(lanes)
        self.kept = list(kept)
        self.raw = raw
        self._alive = 0
        # A graph that uses none of the library's bytes is none of its business.
        self._counted = bool(lanes or kept)
        timeline.graphs += self._counted
        for lane in self.lanes:
            lane.graphs += 1

    def watch(self, graphs: list[DriverGraph]) -> None:
        """Unpin when all of these are destroyed, at once when there are none."""
        self._alive = len(graphs)
        for graph in graphs:
            self.timeline.driver.on_graph_release(graph, self._destroyed)
        if not graphs:
            self.timeline.later(self._unpin)

    def _destroyed(self) -> None:
        # From any thread and any finaliser: no lock, no device call.
        self.timeline.later(self._count)

    def _count(self) -> None:
        self._alive -= 1
        if self._alive == 0:
            self._unpin()

    def _unpin(self) -> None:
        if self.raw and self._counted:
            if self.timeline.captures:
                self.timeline.deferred.append(self._unpin)
                self.timeline.refresh()
                return
            self.timeline.synchronize()
        self.timeline.graphs -= self._counted
        for lane in self.lanes:
            lane.drop_graph()
        for lease in self.kept:
            lease.unpin()
        self.lanes, self.kept = [], []
