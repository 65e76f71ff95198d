"""Declared upper bounds, and what they add up to."""

from __future__ import annotations

from collections import defaultdict

from workspace.layout import ALIGNMENT, round_up
from workspace.request import Request


class Reservation:
    """Layouts declared at their largest, by lane and phase.

    Leases of different phases never live together, so a lane needs the largest phase; leases without a phase live
    beside all of them. A layout declared again in the same phase replaces its bound if the new one is larger; `count`
    leases of it may live at once.
    """

    def __init__(self) -> None:
        self._bounds: dict[tuple[str, str | None], dict[str, int]] = defaultdict(dict)
        self._side_by_side: dict[str, dict[Request, int]] = defaultdict(dict)
        self.requests: list[Request] = []

    def add(self, request: Request, *, lane: str | None, phase: str | None, count: int) -> None:
        bounds = self._bounds[lane or "", phase]
        nbytes = count * round_up(request.nbytes, ALIGNMENT)
        bounds[request.owner] = max(bounds.get(request.owner, 0), nbytes)
        self.requests.append(request)
        beside = self._side_by_side[lane or ""]
        beside[request] = max(beside.get(request, 0), nbytes)

    def with_one(self, request: Request, *, lane: str | None, phase: str | None, count: int) -> Reservation:
        """What would be declared with one more."""
        more = Reservation()
        more._bounds.update({key: dict(bounds) for key, bounds in self._bounds.items()})
        more.add(request, lane=lane, phase=phase, count=count)
        return more

    def nbytes(self, *, micro_batches: int, headroom: float) -> int:
        """Bytes for every lane's graphs and for eager leases of every micro-batch."""
        total = 0
        for lane in sorted({lane for lane, _ in self._bounds}):
            phases = {phase: sum(bounds.values()) for (one, phase), bounds in self._bounds.items() if one == lane}
            always = phases.pop(None, 0)
            need = always + max(phases.values(), default=0)
            total += need * (1 if lane else micro_batches)
        return round_up(int(total * headroom), ALIGNMENT)

    def side_by_side(self, *, micro_batches: int, headroom: float) -> int:
        """Bytes of all that was declared at once, whatever its phase: no block is then cut for another layout."""
        total = sum(sum(sizes.values()) * (1 if lane else micro_batches) for lane, sizes in self._side_by_side.items())
        return round_up(int(total * headroom), ALIGNMENT)

    def __bool__(self) -> bool:
        return bool(self._bounds)
