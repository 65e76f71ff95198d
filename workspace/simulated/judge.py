"""The clock check: is every pair of conflicting accesses ordered? Independent of the clocks it judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from workspace.simulated.access import AccessLog
from workspace.simulated.frontier import Conflict
from workspace.simulated.late import LateAccess
from workspace.simulated.lendings import Lendings, Use
from workspace.simulated.node import Node, Range
from workspace.simulated.order import Point
from workspace.simulated.owners import Owners
from workspace.simulated.race import Access, Race, frames, touched

if TYPE_CHECKING:
    from workspace.simulated.graph import SimulatedGraph

MOST_ALIKE = 16
"""Races of the same labels and streams on different bytes that are kept; more are counted with the first of them."""


class Judge:
    """Access log, owners and races of one device. Called with the device's lock held.

    Every access that is unordered with an earlier conflicting one is found, however long ago that was. A racing
    access is then compared with the last 1024 operations, so that each pair among them is reported and not the last
    one only. After 10,000 conflicts the verdict is settled, and races are found as far as that is cheap.

    Attributes
    ----------
    lendings
        Who has had which bytes since when.
    unmodelled
        Why order or memory is not fully known, and how often; with any reason, the verdict is not SAFE.
    """

    def __init__(self, names: Callable[[int], str]) -> None:
        self._names = names
        self.log = AccessLog(self._report)
        self.owners = Owners()
        self.lendings = Lendings()
        self.unmodelled: Counter[str] = Counter()
        self._races: dict[tuple[object, ...], dict[tuple[object, ...], Race]] = {}
        self._late: dict[tuple[object, ...], LateAccess] = {}

    def races(self) -> list[Race]:
        return [race for alike in self._races.values() for race in alike.values()]

    def late(self) -> list[LateAccess]:
        return list(self._late.values())

    def used(self, node: Node, uses: Iterable[Use]) -> None:
        """A node touches bytes through tensors of leases some of whose bytes have been lent again: perhaps others."""
        for lending, spans, write in uses:
            found = lending.over(spans)
            if found is not None:
                span, since = found
                late = self._late.get((node.label, node.stream, write, lending.owner, since.owner))
                if late is not None:
                    late.count += 1
                    continue
                self._late[node.label, node.stream, write, lending.owner, since.owner] = LateAccess(
                    self._access(node, span, node, write, ""),
                    lending.owner,
                    frames(lending.site),
                    since.owner,
                    frames(since.site),
                )

    def forget(self, address: int, nbytes: int) -> None:
        """The bytes went back to the device."""
        self.log.forget(address, address + nbytes)
        self.lendings.forget(address, address + nbytes)

    def settle(self, address: int, nbytes: int, point: Point) -> None:
        """The allocator saw everything up to `point` complete before it handed these bytes out again.

        The edge holds for the bytes only: a program must not rely on what its allocator happened to see.
        """
        self.log.settle(address, address + nbytes, point)

    def replayed(self, graph: SimulatedGraph) -> None:
        """Report the races inside a graph: they happen at each replay."""
        for conflict in graph.conflicts:
            self._report(conflict, graph.name)

    def streams(self) -> set[int]:
        """Streams that a report may still mention."""
        return self.log.streams() | {node.stream for node in self.log.recent}

    def _report(self, conflict: Conflict, graph: str = "") -> bool:
        """Keep a race or count it; whether it is new."""
        prior, node, start, end, prior_writes, writes = conflict
        kind = (prior.label, node.label, prior.stream, node.stream, prior_writes, writes, graph)
        alike = self._races.setdefault(kind, {})
        if len(alike) >= MOST_ALIKE:
            next(iter(alike.values())).count += 1
            return False
        first, first_range, start, end = side(prior, start, end, prior_writes)
        second, second_range, start, end = side(node, start, end, writes)
        key = (first.label, second.label, first_range, second_range)
        race = alike.get(key)
        if race is not None:
            race.count += 1
            return False
        alike[key] = Race(
            self._access(first, first_range, prior, prior_writes, graph),
            self._access(second, second_range, node, writes, graph),
            start,
            end - start,
            node.clock.get(prior.stream, 0),
            prior.position,
        )
        return True

    def _access(self, inner: Node, extent: Range, outer: Node, write: bool, graph: str) -> Access:
        return Access(
            stream=outer.stream,
            stream_name=self._names(outer.stream),
            position=outer.position,
            address=extent[0],
            nbytes=extent[1],
            write=write,
            label=inner.label,
            owner=self.owners.at(inner.tick, extent[0], extent[0] + extent[1]),
            site=frames(inner.site),
            graph=outer.graph.name if outer.graph is not None else graph,
        )


def side(node: Node, start: int, end: int, write: bool) -> tuple[Node, Range, int, int]:
    """Who touched some bytes: the node (inside a replayed graph), its range, and the bytes it shares."""
    inner = node if node.graph is None else node.graph.touching(start, end, write)
    address, nbytes = touched(inner.writes if write else inner.reads, start, end)
    return inner, (address, nbytes), max(start, address), min(end, address + nbytes)
