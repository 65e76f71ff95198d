"""A stream capture in progress: nodes are collected, not run, and ordered by captured edges only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from workspace.simulated.access import AccessLog
from workspace.simulated.blocks import PrivatePool
from workspace.simulated.events import Event
from workspace.simulated.frontier import Conflict
from workspace.simulated.node import Node, Range
from workspace.simulated.order import Track

Mode = Literal["global", "thread_local", "relaxed"]


class Branch(Track):
    """A stream's part of a capture: its own positions and knowledge, and what its next node depends on."""

    __slots__ = ("ends",)

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self.ends: tuple[Node, ...] = ()


class Capture:
    """One capture, from begin to end.

    Attributes
    ----------
    origin
        Key of the stream it began on, and must end on.
    branches
        By stream key: the streams that are part of it.
    broken
        Why it is invalid, empty as long as it is valid.
    conflicts
        Races between its own nodes; they happen at each replay.
    """

    def __init__(self, number: int, origin: int, mode: Mode, thread: int, log: bool) -> None:
        self.id = number
        self.origin = origin
        self.mode: Mode = mode
        self.thread = thread
        self.private = PrivatePool()
        self.branches: dict[int, Branch] = {origin: Branch(origin)}
        self.nodes: list[Node] = []
        self.broken = ""
        self.open = True
        self.conflicts: list[Conflict] = []
        self._log = AccessLog(self.conflicts.append) if log else None

    def append(
        self,
        stream: int,
        kind: str,
        label: str,
        reads: tuple[Range, ...],
        writes: tuple[Range, ...],
        fn: Callable[[], Any] | None,
    ) -> Node:
        """A node at the end of a branch."""
        branch = self.branches[stream]
        branch.position += 1
        node = Node(stream, branch.position, branch.clock, kind, label, reads, writes, fn)
        node.deps = branch.ends
        branch.ends = (node,)
        self.nodes.append(node)
        if self._log is not None:
            self._log.add(node)
        return node

    def record(self, event: Event, stream: int) -> None:
        """The event now names the end of a branch."""
        branch = self.branches[stream]
        event.stamp, event.capture = None, self
        event.point, event.ends = branch.point(), branch.ends

    def wait(self, event: Event, stream: int) -> None:
        """The stream joins the capture if it was not part of it, and comes after the event."""
        branch = self.branches.get(stream)
        if branch is None:
            branch = self.branches[stream] = Branch(stream)
        assert event.point is not None
        branch.learn(event.point)
        branch.ends = (*branch.ends, *(node for node in event.ends if node not in branch.ends))

    def unjoined(self) -> list[int]:
        """Streams with nodes that the origin does not come after."""
        origin = self.branches[self.origin]
        last: dict[int, int] = {}
        for node in self.nodes:
            last[node.stream] = node.position
        return [key for key, at in last.items() if key != self.origin and origin.clock.get(key, 0) < at]
