"""``upstream``: what serving engines run today, returning forms and no lifetime tracking."""

from __future__ import annotations

from workspace.block import Uses
from workspace.lane import Lane
from workspace.provider import Homes
from workspace.request import Request
from workspace.strategies.caching import Caching


class Upstream(Caching):
    """Unsafe: nothing tells the allocator of uses on other streams; only the model's own joins keep results right."""

    name = "upstream"
    safe = False

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        self._counted.allocated -= sum(request.extents[position].nbytes for position in homes)

    def inside(self, lane: Lane | None) -> Upstream:
        return self
