"""The oracle of the clocks: operations are vertices, promises are edges, order is a path.

It knows no clocks and no epochs. Every operation on a stream follows the one before it on that stream, and whatever the
host had seen complete when it was enqueued.
"""

from __future__ import annotations

Vertex = int


class Order:
    """A program as an explicit graph; order is found by walking backwards."""

    def __init__(self) -> None:
        self._before: list[tuple[Vertex, ...]] = []
        self._tails: dict[int, Vertex] = {}
        self._host: set[Vertex] = set()

    def enqueue(self, stream: int, *after: Vertex) -> Vertex:
        """One more operation on a stream, which also comes after the given ones."""
        before = set(after) | self._host
        if stream in self._tails:
            before.add(self._tails[stream])
        self._before.append(tuple(before))
        self._tails[stream] = len(self._before) - 1
        return self._tails[stream]

    def host_saw(self, vertex: Vertex) -> None:
        """The host knows the operation complete: everything enqueued from now on comes after it."""
        self._host.add(vertex)

    def preceding(self, stream: int) -> set[Vertex]:
        """Every operation that a next one on the stream would come after."""
        frontier = list(self._host)
        if stream in self._tails:
            frontier.append(self._tails[stream])
        found = set(frontier)
        while frontier:
            for vertex in self._before[frontier.pop()]:
                if vertex not in found:
                    found.add(vertex)
                    frontier.append(vertex)
        return found
