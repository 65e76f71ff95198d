"""What a live graph pins: its lanes' footprints, and the leases of before the capture that it uses."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workspace.capture import Capture
    from workspace.driver import Graph as DriverGraph
    from workspace.graph import Graph


class Pins:
    """Kept until every segment of a graph is destroyed; holds no graph, so that dropping one destroys it.

    Attributes
    ----------
    providers
        Identities of the providers whose bytes it uses; none for a graph that is no business of the library.
    graph
        The library's graph, where there is one.
    sleeping
        Workspaces that sleep, and since when, by the identities of their providers.
    memory
        Tensors of the framework's allocator declared used in the capture.
    raw
        The graph may have been replayed without the library's knowledge. Such replays may be under way on any
        stream, and only the device's idleness proves them over.
    """

    def __init__(self, capture: Capture) -> None:
        self.timeline = capture.timeline
        self.lanes = list(capture.lanes)
        self.kept = list(capture.kept)
        self.memory = list(capture.memory)
        self.raw = capture.raw
        self.graph: weakref.ref[Graph] | None = None
        self.sleeping: dict[int, str] = {}
        self.providers = {id(provider) for provider in capture.providers} | {id(one.parent) for one in self.kept}
        self._alive = 0
        if self.providers:
            self.timeline.pins.add(self)
        for lane in self.lanes:
            lane.graphs += 1

    def replayable(self) -> Graph | None:
        """The library's graph; None where there is none, or it has been dropped."""
        return self.graph() if self.graph is not None else None

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
        if self.raw and self.providers:
            if self.timeline.captures:
                self.timeline.deferred.append(self._unpin)
                self.timeline.refresh()
                return
            self.timeline.synchronize()
        self.timeline.pins.discard(self)
        for lane in self.lanes:
            lane.drop_graph()
        kept, self.lanes, self.kept, self.memory = self.kept, [], [], []
        first: BaseException | None = None
        for holding in kept:
            try:
                holding.unpin()
            except BaseException as error:  # the others go all the same: their bytes would be lost
                first = first or error
        if first is not None:
            raise first
