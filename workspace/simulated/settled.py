"""What is over for some bytes although no stream knows it: the allocator saw it complete, or the bytes went back."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from workspace.simulated.node import Node
from workspace.simulated.order import Clock

MOST = 1024


class End(NamedTuple):
    """Of the operations up to number `tick`, those that `clock` covers are over for these bytes; None covers all."""

    tick: int
    start: int
    end: int
    clock: Clock | None

    def covers(self, node: Node) -> bool:
        """Whether the accesses to these bytes are over, of a node up to number `tick`."""
        return self.clock is None or self.clock.get(node.stream, 0) >= node.position


class Settled:
    """The last 1024 ends that operations logged recently may have met.

    Only the look back over recent operations asks: the frontier has dropped what they cover already.
    """

    def __init__(self) -> None:
        self._ends: deque[End] = deque(maxlen=MOST)

    def add(self, start: int, end: int, clock: Clock | None, recent: deque[Node]) -> None:
        """Remember an end for the nodes in `recent`, and drop those that precede all of them."""
        ends = self._ends
        if not recent:
            ends.clear()
            return
        while ends and ends[0].tick < recent[0].tick:
            ends.popleft()
        ends.append(End(recent[-1].tick, start, end, clock))

    def left(self, node: Node, start: int, end: int) -> list[tuple[int, int]]:
        """The runs of ``[start, end)`` for which the node is not over."""
        runs = [(start, end)]
        for over in reversed(self._ends):  # the latest covers most, and is often all that is asked
            if not runs or over.tick < node.tick:
                break
            if over.start < end and start < over.end and over.covers(node):
                runs = [
                    (first, last)
                    for a, b in runs
                    for first, last in ((a, min(b, over.start)), (max(a, over.end), b))
                    if first < last
                ]
        return runs
