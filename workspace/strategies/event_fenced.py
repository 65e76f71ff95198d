"""``event_fenced``: one pool for all streams, and a fence only where the clocks cannot show the order."""

from __future__ import annotations

from workspace.block import Block
from workspace.pool import Home
from workspace.request import Request
from workspace.strategies.pooled import Pooled
from workspace.streams import Stream


class EventFenced(Pooled):
    """Least memory with several streams: any free block serves any stream, and any neighbours coalesce when needed."""

    name = "event_fenced"
    shares = True

    def home(self, stream: Stream) -> Home:
        return 0

    def elsewhere(self, request: Request, stream: Stream) -> Block | None:
        return None
