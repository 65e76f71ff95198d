"""``event_fenced``: one pool for all streams, and a fence only where the clocks cannot show the order."""

from __future__ import annotations

from workspace.block import Block
from workspace.config import WorkspaceConfig
from workspace.pool import Home
from workspace.request import Request
from workspace.source import Source
from workspace.strategies.pooled import Pooled
from workspace.streams import Stream
from workspace.timeline import Timeline


class EventFenced(Pooled):
    """Least memory with several streams: any free block serves any stream, and any neighbours coalesce when needed."""

    name = "event_fenced"
    shares = True

    def __init__(self, timeline: Timeline, config: WorkspaceConfig, source: Source | None = None) -> None:
        super().__init__(timeline, config, source)
        # A capture's footprint is lengthened at its end, where the next lease of a larger bucket has to find room.
        self.pool.two_ends = not self.source.fixed

    def home(self, stream: Stream) -> Home:
        return 0

    def elsewhere(self, request: Request, stream: Stream) -> Block | None:
        return None
