"""Who touched which bytes last: an interval map that finds conflicting accesses no edge orders.

For each byte the map keeps the *frontier*: the accesses that no later access to that byte comes after. An
access that is unordered with any earlier conflicting one is unordered with one on the frontier, so comparing
with the frontier misses no racing access. It also bounds memory: bytes that are written and read in turn have
one or two entries.

Nodes arrive in host order, which is compatible with every order of the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from workspace.simulated.node import Node, Range
from workspace.simulated.order import Clock, Point, knows

FIRST_COMPACTION = 1024


class Conflict(NamedTuple):
    """Two accesses to the same bytes, at least one a write, that no edge orders."""

    prior: Node
    node: Node
    start: int
    end: int
    prior_writes: bool
    writes: bool


class Segment:
    """Bytes with one frontier; an end of -1 marks one that is no longer part of the map."""

    __slots__ = ("end", "reads", "start", "writes")

    def __init__(self, start: int, end: int, writes: tuple[Node, ...], reads: tuple[Node, ...]) -> None:
        self.start = start
        self.end = end
        self.writes = writes
        self.reads = reads


class AccessLog:
    """The interval map. Segments are disjoint and sorted; ranges without history are not in it.

    Parameters
    ----------
    found
        Receives each conflict between a new access and one on the frontier.
    """

    def __init__(self, found: Callable[[Conflict], object]) -> None:
        self._found = found
        self._starts: list[int] = []
        self._segments: list[Segment] = []
        self._exact: dict[Range, Segment] = {}
        self._limit = FIRST_COMPACTION

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, node: Node) -> None:
        """Log a node's accesses."""
        for key in node.reads:
            segment = self._exact.get(key)
            if segment is not None and segment.start == key[0] and segment.end == key[0] + key[1]:
                self._read(segment, node)
            else:
                self._read_range(key, node)
        for key in node.writes:
            segment = self._exact.get(key)
            if segment is not None and segment.start == key[0] and segment.end == key[0] + key[1]:
                if self._conflicts(segment, node, segment.start, segment.end):
                    self._keep_racing(segment, node)
                else:
                    segment.writes = (node,)
                    segment.reads = ()
            else:
                self._write_range(key, node)

    def forget(self, start: int, end: int) -> None:
        """Drop the history of bytes that went back to the device."""
        i, j = self._carve(start, end)
        self._replace(i, j, [])

    def settle(self, start: int, end: int, point: Point) -> None:
        """Everything up to `point` is complete as far as these bytes are concerned."""
        i, j = self._carve(start, end)
        clock = {**point.clock, point.stream: point.position}
        self._replace(i, j, [piece for piece in self._segments[i:j] if strip(piece, clock)])

    def compact(self, complete: Clock) -> None:
        """Drop what the host has seen complete, and join neighbours with one frontier."""
        kept: list[Segment] = []
        for segment in self._segments:
            if not strip(segment, complete):
                segment.end = -1
                continue
            last = kept[-1] if kept else None
            if (
                last is not None
                and last.end == segment.start
                and last.writes == segment.writes
                and last.reads == segment.reads
            ):
                last.end = segment.end
                segment.end = -1
            else:
                kept.append(segment)
        self._segments = kept
        self._starts = [segment.start for segment in kept]
        self._exact = {}
        self._limit = max(FIRST_COMPACTION, 2 * len(kept))

    def full(self) -> bool:
        """Whether a compaction is due; doubling makes its cost constant per access."""
        return len(self._segments) > self._limit or len(self._exact) > 4 * self._limit

    def streams(self) -> set[int]:
        """Streams that some frontier names."""
        return {node.stream for piece in self._segments for node in (*piece.writes, *piece.reads)}

    def _read(self, segment: Segment, node: Node) -> None:
        stream, clock = node.stream, node.clock
        for prior in segment.writes:
            if prior.stream != stream and clock.get(prior.stream, 0) < prior.position:
                self._found(Conflict(prior, node, segment.start, segment.end, True, False))
        reads = segment.reads
        if not reads or (len(reads) == 1 and reads[0].stream == stream):
            segment.reads = (node,)
        else:
            segment.reads = (*(r for r in reads if not knows(stream, clock, r.stream, r.position)), node)

    def _read_range(self, key: Range, node: Node) -> None:
        start, end = key[0], key[0] + key[1]
        i, j = self._carve(start, end)
        pieces: list[Segment] = []
        at = start
        for segment in self._segments[i:j]:
            if segment.start > at:
                pieces.append(Segment(at, segment.start, (), (node,)))
            self._read(segment, node)
            pieces.append(segment)
            at = segment.end
        if at < end:
            pieces.append(Segment(at, end, (), (node,)))
        if len(pieces) != j - i:
            self._segments[i:j] = pieces
            self._starts[i:j] = [piece.start for piece in pieces]
        if len(pieces) == 1:
            self._exact[key] = pieces[0]

    def _conflicts(self, segment: Segment, node: Node, start: int, end: int) -> bool:
        """Report each access on a frontier that a write by `node` is not ordered after."""
        stream, clock = node.stream, node.clock
        racing = False
        for prior in segment.writes:
            if prior.stream != stream and clock.get(prior.stream, 0) < prior.position:
                racing = True
                self._found(
                    Conflict(prior, node, max(start, segment.start), min(end, segment.end), True, True)
                )
        for prior in segment.reads:
            if prior.stream != stream and clock.get(prior.stream, 0) < prior.position:
                racing = True
                self._found(
                    Conflict(prior, node, max(start, segment.start), min(end, segment.end), False, True)
                )
        return racing

    def _keep_racing(self, segment: Segment, node: Node) -> None:
        """A racing write does not come after what it races with: both stay on the frontier."""
        stream, clock = node.stream, node.clock
        segment.writes = (
            *(p for p in segment.writes if not knows(stream, clock, p.stream, p.position)),
            node,
        )
        segment.reads = tuple(p for p in segment.reads if not knows(stream, clock, p.stream, p.position))

    def _write_range(self, key: Range, node: Node) -> None:
        start, end = key[0], key[0] + key[1]
        i, j = self._overlapped(start, end)
        racing = False
        for segment in self._segments[i:j]:
            racing |= self._conflicts(segment, node, start, end)
        i, j = self._carve(start, end)
        if not racing:
            fresh = Segment(start, end, (node,), ())
            self._replace(i, j, [fresh])
            self._exact[key] = fresh
            return
        pieces: list[Segment] = []
        at = start
        for segment in self._segments[i:j]:
            if segment.start > at:
                pieces.append(Segment(at, segment.start, (node,), ()))
            self._keep_racing(segment, node)
            pieces.append(segment)
            at = segment.end
        if at < end:
            pieces.append(Segment(at, end, (node,), ()))
        self._segments[i:j] = pieces
        self._starts[i:j] = [piece.start for piece in pieces]

    def _overlapped(self, start: int, end: int) -> tuple[int, int]:
        """Indices of the segments that share bytes with ``[start, end)``."""
        i = bisect_right(self._starts, start) - 1
        if i < 0 or self._segments[i].end <= start:
            i += 1
        j = i
        while j < len(self._starts) and self._starts[j] < end:
            j += 1
        return i, j

    def _carve(self, start: int, end: int) -> tuple[int, int]:
        """Split at both ends; indices of the segments that lie in ``[start, end)``."""
        i, j = self._overlapped(start, end)
        if i < j and self._segments[i].start < start:
            self._split(i, start)
            i, j = i + 1, j + 1
        if i < j and self._segments[j - 1].end > end:
            self._split(j - 1, end)
        return i, j

    def _split(self, index: int, at: int) -> None:
        segment = self._segments[index]
        rest = Segment(at, segment.end, segment.writes, segment.reads)
        segment.end = at
        self._segments.insert(index + 1, rest)
        self._starts.insert(index + 1, at)

    def _replace(self, i: int, j: int, pieces: list[Segment]) -> None:
        kept = set(map(id, pieces))
        for segment in self._segments[i:j]:
            if id(segment) not in kept:
                segment.end = -1
        self._segments[i:j] = pieces
        self._starts[i:j] = [piece.start for piece in pieces]


def strip(segment: Segment, complete: Clock) -> bool:
    """Drop entries that `complete` covers; whether any is left."""
    get = complete.get
    if any(get(node.stream, 0) >= node.position for node in (*segment.writes, *segment.reads)):
        segment.writes = tuple(n for n in segment.writes if get(n.stream, 0) < n.position)
        segment.reads = tuple(n for n in segment.reads if get(n.stream, 0) < n.position)
    return bool(segment.writes or segment.reads)
