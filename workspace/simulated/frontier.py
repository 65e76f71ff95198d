"""Frontiers: the accesses to some bytes that no later access to them comes after."""

from __future__ import annotations

from typing import NamedTuple

from workspace.simulated.node import Node
from workspace.simulated.order import Clock, knows


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


def races(segment: Segment, node: Node) -> bool:
    """Whether a write by `node` is unordered with something on a frontier."""
    stream, clock = node.stream, node.clock
    for prior in segment.writes:
        if prior.stream != stream and clock.get(prior.stream, 0) < prior.position:
            return True
    for prior in segment.reads:
        if prior.stream != stream and clock.get(prior.stream, 0) < prior.position:
            return True
    return False


def keep_racing(segment: Segment, node: Node) -> None:
    """Add a racing write: it does not come after what it races with, so both stay on the frontier."""
    stream, clock = node.stream, node.clock
    racing = tuple(p for p in segment.writes if not knows(stream, clock, p.stream, p.position))
    segment.writes = (*racing, node)
    segment.reads = tuple(p for p in segment.reads if not knows(stream, clock, p.stream, p.position))


def overlaps(node: Node, other: Node) -> list[tuple[int, int, bool, bool]]:
    """Conflicting overlaps of two nodes: (start, end, whether the first writes, whether the second does)."""
    found = []
    for mine, theirs, writes, also in (
        (node.writes, other.writes, True, True),
        (node.writes, other.reads, True, False),
        (node.reads, other.writes, False, True),
    ):
        for a, n in mine:
            for b, m in theirs:
                if a < b + m and b < a + n:
                    found.append((max(a, b), min(a + n, b + m), writes, also))
    return found


def strip(segment: Segment, complete: Clock) -> bool:
    """Drop entries that `complete` covers; whether any is left."""
    get = complete.get
    if any(get(node.stream, 0) >= node.position for node in (*segment.writes, *segment.reads)):
        segment.writes = tuple(n for n in segment.writes if get(n.stream, 0) < n.position)
        segment.reads = tuple(n for n in segment.reads if get(n.stream, 0) < n.position)
    return bool(segment.writes or segment.reads)
