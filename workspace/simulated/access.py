"""Who touched which bytes last: an interval map that finds conflicting accesses no edge orders.

For each byte the map keeps the *frontier*: the accesses that no later access to that byte comes after. An
access that is unordered with any earlier conflicting one is unordered with one on the frontier, so comparing
with the frontier misses no racing access. It also bounds memory: bytes that are written and read in turn have
one or two entries.

Nodes arrive in host order, which is compatible with every order of the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from workspace.simulated.frontier import Conflict, Segment, keep_racing, overlaps, races, strip
from workspace.simulated.node import Node, Range
from workspace.simulated.order import Clock, Point, knows
from workspace.simulated.settled import Settled

FIRST_COMPACTION = 1024
RECENT = 1024
THOROUGH = 10_000
"""Conflicts after which a racing write takes the place of what it races with: enough is known, and a frontier of
racing accesses costs time and memory."""


class AccessLog:
    """The interval map. Segments are disjoint and sorted; ranges without history are not in it.

    Parameters
    ----------
    found
        Receives each access on the frontier that a new one conflicts with, and returns False if it knows the
        pair. Otherwise it also gets each conflict of the new access with one of the last 1024 nodes.

    Attributes
    ----------
    recent
        The nodes logged last.
    conflicts
        How many were found on the frontier.
    crowded
        Whether `compact` is due. The bound doubles with what is kept, so that its cost is constant per
        access.
    """

    def __init__(self, found: Callable[[Conflict], object]) -> None:
        self._found = found
        self._starts: list[int] = []
        self._segments: list[Segment] = []
        self._exact: dict[Range, Segment] = {}
        self._limit = FIRST_COMPACTION
        self.crowded = False
        self.conflicts = 0
        self.recent: deque[Node] = deque(maxlen=RECENT)
        self._settled = Settled()

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, node: Node) -> None:
        """Log a node's accesses."""
        self.recent.append(node)
        exact = self._exact
        for key in node.reads:
            segment = exact.get(key)
            if segment is not None and segment.start == key[0] and segment.end == key[0] + key[1]:
                self._read(segment, node)
            else:
                self._read_range(key, node)
        for key in node.writes:
            segment = exact.get(key)
            if segment is None or segment.start != key[0] or segment.end != key[0] + key[1]:
                self._write_range(key, node)
            elif races(segment, node):
                self._write_racing(key[0], key[0] + key[1], node)
            else:
                segment.writes = (node,)
                segment.reads = ()

    def forget(self, start: int, end: int) -> None:
        """Drop the history of bytes that went back to the device."""
        i, j = self._carve(start, end)
        self._replace(i, j, [])
        self._settled.add(start, end, None, self.recent)

    def settle(self, start: int, end: int, point: Point) -> None:
        """Everything up to `point` is complete as far as these bytes are concerned."""
        i, j = self._carve(start, end)
        clock = {**point.clock, point.stream: point.position}
        self._replace(i, j, [piece for piece in self._segments[i:j] if strip(piece, clock)])
        self._settled.add(start, end, clock, self.recent)

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
        self.recent = deque((n for n in self.recent if complete.get(n.stream, 0) < n.position), RECENT)
        self._segments = kept
        self._starts = [segment.start for segment in kept]
        self._exact = {}
        self._limit = max(FIRST_COMPACTION, 2 * len(kept))
        self.crowded = False

    def streams(self) -> set[int]:
        """Streams that some frontier names."""
        return {node.stream for piece in self._segments for node in (*piece.writes, *piece.reads)}

    def _read(self, segment: Segment, node: Node) -> None:
        stream, clock = node.stream, node.clock
        for prior in segment.writes:
            if prior.stream != stream and clock.get(prior.stream, 0) < prior.position:
                self._report(Conflict(prior, node, segment.start, segment.end, True, False))
        reads = segment.reads
        if reads and (reads[0].stream != stream or len(reads) > 1):
            segment.reads = (*(r for r in reads if not knows(stream, clock, r.stream, r.position)), node)
        else:
            segment.reads = (node,)

    def _read_range(self, key: Range, node: Node) -> None:
        start, end = key[0], key[0] + key[1]
        i, j = self._overlapped(start, end)
        segments = self._segments
        if j == i + 1 and segments[i].start == start and segments[i].end == end:
            self._read(segments[i], node)
            self._remember(key, segments[i])
            return
        if i < j and segments[i].start < start:
            self._split(i, start)
            i, j = i + 1, j + 1
        if i < j and segments[j - 1].end > end:
            self._split(j - 1, end)
        pieces: list[Segment] = []
        at = start
        for segment in segments[i:j]:
            if segment.start > at:
                pieces.append(Segment(at, segment.start, (), (node,)))
            self._read(segment, node)
            pieces.append(segment)
            at = segment.end
        if at < end:
            pieces.append(Segment(at, end, (), (node,)))
        if len(pieces) != j - i:
            segments[i:j] = pieces
            self._starts[i:j] = [piece.start for piece in pieces]
        if len(pieces) == 1:
            self._remember(key, pieces[0])
        elif len(self._starts) > self._limit:
            self.crowded = True

    def _write_range(self, key: Range, node: Node) -> None:
        start, end = key[0], key[0] + key[1]
        starts, segments = self._starts, self._segments
        stream, known = node.stream, node.clock.get
        i = bisect_right(starts, start)
        if i and segments[i - 1].end > start:
            i -= 1
        j, count = i, len(starts)
        while j < count and starts[j] < end:  # `races`, in place: half the cost of a logged launch is here
            segment = segments[j]
            for prior in segment.writes:
                if prior.stream != stream and known(prior.stream, 0) < prior.position:
                    self._write_racing(start, end, node)
                    return
            for prior in segment.reads:
                if prior.stream != stream and known(prior.stream, 0) < prior.position:
                    self._write_racing(start, end, node)
                    return
            j += 1
        if i < j:
            first, last = segments[i], segments[j - 1]
            if first.start < start:
                if first.end > end:
                    self._split(i, end)
                first.end = start
                i += 1
            if i < j and last.end > end:
                last.start = starts[j - 1] = end
                j -= 1
        if j == i + 1:
            fresh = segments[i]
            fresh.start = starts[i] = start
            fresh.end, fresh.writes, fresh.reads = end, (node,), ()
        else:
            fresh = Segment(start, end, (node,), ())
            for segment in segments[i:j]:
                segment.end = -1
            segments[i:j] = (fresh,)
            starts[i:j] = (start,)
        self._remember(key, fresh)

    def _remember(self, key: Range, segment: Segment) -> None:
        """This range is this segment, until the segment's ends move."""
        self._exact[key] = segment
        if len(self._exact) > 4 * self._limit or len(self._starts) > self._limit:
            self.crowded = True

    def _write_racing(self, start: int, end: int, node: Node) -> None:
        i, j = self._carve(start, end)
        if self.conflicts >= THOROUGH:
            for segment in self._segments[i:j]:
                self._race(segment, node, start, end)
            self._replace(i, j, [Segment(start, end, (node,), ())])
            return
        pieces: list[Segment] = []
        at = start
        for segment in self._segments[i:j]:
            if segment.start > at:
                pieces.append(Segment(at, segment.start, (node,), ()))
            self._race(segment, node, start, end)
            keep_racing(segment, node)
            pieces.append(segment)
            at = segment.end
        if at < end:
            pieces.append(Segment(at, end, (node,), ()))
        self._segments[i:j] = pieces
        self._starts[i:j] = [piece.start for piece in pieces]

    def _race(self, segment: Segment, node: Node, start: int, end: int) -> None:
        """Report each access on a frontier that a write by `node` does not come after."""
        start, end = max(start, segment.start), min(end, segment.end)
        for priors, prior_writes in ((segment.writes, True), (segment.reads, False)):
            for prior in priors:
                if not knows(node.stream, node.clock, prior.stream, prior.position):
                    self._report(Conflict(prior, node, start, end, prior_writes, True))

    def _report(self, conflict: Conflict) -> None:
        """Pass on a conflict; when it is news, also those with recent accesses no longer on the frontier."""
        self.conflicts += 1
        if self._found(conflict) is False or self.conflicts > THOROUGH:
            return
        node = conflict.node
        for prior in self.recent:
            if knows(node.stream, node.clock, prior.stream, prior.position):
                continue
            for first, last, prior_writes, writes in overlaps(prior, node):
                for start, end in self._settled.left(prior, first, last):
                    if prior is not conflict.prior or writes != conflict.writes or not start <= conflict.start < end:
                        self._found(Conflict(prior, node, start, end, prior_writes, writes))

    def _overlapped(self, start: int, end: int) -> tuple[int, int]:
        """Indices of the segments that share bytes with ``[start, end)``."""
        starts = self._starts
        i = bisect_right(starts, start) - 1
        if i < 0 or self._segments[i].end <= start:
            i += 1
        j, count = i, len(starts)
        while j < count and starts[j] < end:
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
