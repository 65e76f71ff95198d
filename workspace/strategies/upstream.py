"""``upstream``: what serving engines run today, returning forms and no lifetime tracking."""

from __future__ import annotations

from typing import Any

from workspace.block import Uses
from workspace.lane import Lane
from workspace.request import Request
from workspace.strategies.caching import Caching
from workspace.streams import Stream


class Upstream(Caching):
    """Unsafe: nothing tells the allocator of uses on other streams; only the model's own joins keep results right."""

    name = "upstream"
    safe = False

    def returned(self, request: Request, position: int, memory: Any, stream: Stream, uses: Uses) -> None:
        self._counted.allocated -= request.extents[position].nbytes

    def inside(self, lane: Lane | None) -> Upstream:
        return self
