"""The clock check: is every pair of conflicting accesses ordered? Independent of the clocks it judges."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from workspace.simulated.access import AccessLog, Conflict
from workspace.simulated.node import Node
from workspace.simulated.order import Point, knows
from workspace.simulated.owners import Owners
from workspace.simulated.race import Access, Race, frames, overlaps, touched

if TYPE_CHECKING:
    from workspace.simulated.graph import SimulatedGraph

Verdict = Literal["SAFE", "UNSAFE", "UNKNOWN"]
HISTORY = 4096
MOST_RACES = 10_000


class Judge:
    """Access log, owners and races of one device. Called with the device's lock held.

    Every access that is unordered with an earlier conflicting one is found, however long ago that was. A
    racing access is then compared with the last 4096 operations, so that each pair among them is reported,
    not the last one only.

    Attributes
    ----------
    unmodelled
        Operations whose effect on order or memory is not modelled; with any, the verdict is not SAFE.
    dropped
        Distinct races beyond the first 10,000, counted and not kept.
    """

    def __init__(self, names: Callable[[int], str]) -> None:
        self._names = names
        self.log = AccessLog(self._found)
        self.owners = Owners()
        self.unmodelled: list[str] = []
        self.dropped = 0
        self._races: dict[tuple[object, ...], Race] = {}
        self._history: deque[Node] = deque(maxlen=HISTORY)

    def add(self, node: Node) -> None:
        """Check a node against everything before it."""
        self.log.add(node)
        self._history.append(node)

    def races(self) -> list[Race]:
        return list(self._races.values())

    def verdict(self) -> Verdict:
        """UNSAFE with a race, UNKNOWN if something was not modelled, else SAFE."""
        if self._races:
            return "UNSAFE"
        return "UNKNOWN" if self.unmodelled else "SAFE"

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
        return self.log.streams() | {node.stream for node in self._history}

    def _found(self, conflict: Conflict) -> None:
        if not self._report(conflict, ""):
            return
        node = conflict.node
        for prior in self._history:
            if knows(node.stream, node.clock, prior.stream, prior.position):
                continue
            for start, end, prior_writes, writes in overlaps(prior, node):
                if prior is not conflict.prior or (start, end) != (conflict.start, conflict.end):
                    self._report(Conflict(prior, node, start, end, prior_writes, writes), "")

    def _report(self, conflict: Conflict, graph: str) -> bool:
        """Keep a race or count it; whether it is new."""
        prior, node, start, end, prior_writes, writes = conflict
        first = _side(prior, start, end, prior_writes)
        second = _side(node, start, end, writes)
        key = (
            first[0].label,
            second[0].label,
            prior.stream,
            node.stream,
            first[1],
            second[1],
            prior_writes,
            writes,
            graph,
        )
        race = self._races.get(key)
        if race is not None:
            race.count += 1
            return False
        if len(self._races) >= MOST_RACES:
            self.dropped += 1
            return False
        self._races[key] = Race(
            self._access(*first, prior, prior_writes, graph),
            self._access(*second, node, writes, graph),
            start,
            end - start,
            node.clock.get(prior.stream, 0),
            prior.position,
        )
        return True

    def _access(self, inner: Node, extent: tuple[int, int], outer: Node, write: bool, graph: str) -> Access:
        name = outer.graph.name if outer.graph is not None else graph
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
            graph=name,
        )


def _side(node: Node, start: int, end: int, write: bool) -> tuple[Node, tuple[int, int]]:
    """The node that touched the bytes (inside the graph, for a replay) and the whole range it touched."""
    inner = node if node.graph is None else node.graph.touching(start, end, write)
    extent = touched(inner.writes if write else inner.reads, start, end)
    return inner, extent or (start, end - start)
