"""Which stream runs next: the legal orders in which a device may execute what was enqueued.

A schedule chooses among the streams whose head is runnable. Everything it may choose is legal, so any
difference in results between two schedules is a missing edge in the program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from workspace.simulated.node import Node


class Schedule(Protocol):
    """Chooses the next node; called with the device's lock held."""

    def choose(self, heads: Sequence[Node]) -> int:
        """Index of the head to run; `heads`: one node per runnable stream, oldest first, at least one."""

    def burst(self, pending: int) -> int:
        """How many nodes to run right after one was enqueued (0: none until somebody synchronises)."""


class InOrder:
    """Oldest node first: the order of the host program, as if every launch ran at once."""

    def choose(self, heads: Sequence[Node]) -> int:
        return 0

    def burst(self, pending: int) -> int:
        return 0


class Random:
    """A seeded choice at every step, and seeded bursts between enqueues.

    Parameters
    ----------
    seed
        Replays the same interleaving for the same host program.
    eagerness
        Chance that an enqueue lets the device run some of its backlog, 0 to 1.
    """

    def __init__(self, seed: int, eagerness: float = 0.1) -> None:
        self.seed = seed
        self.eagerness = eagerness
        self._random = random.Random(seed)

    def choose(self, heads: Sequence[Node]) -> int:
        return self._random.randrange(len(heads))

    def burst(self, pending: int) -> int:
        return self._random.randint(1, pending) if self._random.random() < self.eagerness else 0


class StreamFirst:
    """One stream runs whenever it can, the others only when it cannot; `last=True` turns that round."""

    def __init__(self, stream: int, last: bool = False) -> None:
        self.stream = stream
        self.last = last

    def choose(self, heads: Sequence[Node]) -> int:
        for index, head in enumerate(heads):
            if (head.stream == self.stream) != self.last:
                return index
        return 0

    def burst(self, pending: int) -> int:
        return 0


class Directed:
    """Drives one racing pair to its bad order: `first` runs before `second` if any legal order allows it.

    Parameters
    ----------
    first, second
        Recognise the two nodes (``lambda node: node.label == "reader"``). `second` is held back, with what is
        behind it on its stream, until `first` has run or nothing else can.
    """

    def __init__(self, first: Callable[[Node], bool], second: Callable[[Node], bool]) -> None:
        self.first = first
        self.second = second
        self.seen = False

    def choose(self, heads: Sequence[Node]) -> int:
        if not self.seen:
            for index, head in enumerate(heads):
                if self.first(head):
                    self.seen = True
                    return index
            for index, head in enumerate(heads):
                if not self.second(head):
                    return index
        return 0

    def burst(self, pending: int) -> int:
        return 0
