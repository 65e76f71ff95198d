"""The oracle of the clock check: every operation is a vertex, every promise an edge, order is reachability.

It knows nothing of clocks: it keeps the edges of the program and asks for paths.
"""

from __future__ import annotations

Accesses = tuple[tuple[int, int, bool], ...]
"""(start, end, write) triples."""


class Reachability:
    """A program's order, as ancestors of each vertex (bit sets over all vertices before it)."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.accesses: list[Accesses] = []
        self._before: list[int] = []
        self._last: dict[int, int] = {}
        self._events: dict[int, int] = {}
        self._host = 0

    def vertex(self, label: str, accesses: Accesses, *masks: int) -> int:
        """A new vertex after everything in `masks` (sets of vertices); return the set of it and its ancestors."""
        number = len(self.labels)
        before = 0
        for mask in masks:
            before |= mask
        for earlier in range(number):
            if before >> earlier & 1:
                before |= self._before[earlier]
        self.labels.append(label)
        self.accesses.append(accesses)
        self._before.append(before)
        return 1 << number

    def end(self, stream: int) -> int:
        return self._last.get(stream, 0)

    def launch(self, stream: int, label: str, accesses: Accesses, *masks: int) -> None:
        self._last[stream] = self.vertex(label, accesses, self.end(stream), self._host, *masks)

    def record(self, event: int, stream: int) -> None:
        self._events[event] = self.vertex("record", (), self.end(stream), self._host)

    def wait(self, event: int, stream: int) -> None:
        if event in self._events:
            self._last[stream] = self.vertex("wait", (), self.end(stream), self._events[event])

    def host_sees_event(self, event: int) -> None:
        self._host |= self._events.get(event, 0)

    def host_sees_stream(self, stream: int) -> None:
        self._host |= self.vertex("idle", (), self.end(stream), self._host)

    def replace_stream(self, stream: int) -> None:
        """Another stream takes this number; it comes after nothing but what the host saw."""
        self._last.pop(stream, None)

    def ordered(self, first: int, second: int) -> bool:
        return bool(self._before[second] >> first & 1)

    def races(self) -> set[tuple[str, str]]:
        """Labels of each pair of conflicting accesses without a path between them."""
        found = set()
        for second in range(len(self.labels)):
            for first in range(second):
                if conflict(self.accesses[first], self.accesses[second]) and not self.ordered(first, second):
                    found.add((self.labels[first], self.labels[second]))
        return found


def conflict(first: Accesses, second: Accesses) -> bool:
    return any(a < d and c < b and (v or w) for a, b, v in first for c, d, w in second)
