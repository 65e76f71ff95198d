"""Deferred execution: nodes wait on their streams until a schedule runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from workspace.errors import DriverError
from workspace.simulated.node import Node
from workspace.simulated.schedule import InOrder, Schedule


class NodeQueue:
    """Per-stream queues of nodes that were enqueued and have not run.

    Attributes
    ----------
    schedule
        Chooses the next node; replace it at any time.
    execute
        Runs one node (default: calls ``node.fn``). The hook of the deferred executor: it wraps the call in
        whatever modes the operation was enqueued under. Called with the device's lock held, in the thread
        that drains.
    fault
        The first error a node raised. It is sticky, as on CUDA: the device refuses everything afterwards.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule: Schedule = schedule or InOrder()
        self.execute: Callable[[Node], None] = run
        self.fault: BaseException | None = None
        self.executed = 0
        self._lines: dict[int, deque[tuple[int, Node]]] = {}
        self._enqueued = 0
        self._running = False

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def push(self, node: Node) -> None:
        """Append a node to its stream, then let the schedule run part of the backlog."""
        self.check()
        self._enqueued += 1
        self._lines.setdefault(node.stream, deque()).append((self._enqueued, node))
        if not self._running:
            for _ in range(self.schedule.burst(len(self))):
                if not self.step():
                    break

    def last(self, stream: int) -> Node | None:
        """The youngest node pending on a stream."""
        line = self._lines.get(stream)
        return line[-1][1] if line else None

    def heads(self) -> list[Node]:
        """The nodes that may run next, oldest enqueue first."""
        ready = [line[0] for line in self._lines.values() if all(dep.done for dep in line[0][1].deps)]
        ready.sort(key=lambda entry: entry[0])
        return [node for _, node in ready]

    def step(self) -> bool:
        """Run one node; False when nothing is pending (or when called from inside a node)."""
        if self._running or not self._lines:
            return False
        heads = self.heads()
        node = heads[self.schedule.choose(heads)]
        line = self._lines[node.stream]
        line.popleft()
        if not line:
            del self._lines[node.stream]
        self._run(node)
        return True

    def drain(self, until: Node | Callable[[], bool] | None = None, schedule: Schedule | None = None) -> None:
        """Run nodes until one is done, a condition holds, or with None until nothing is pending."""
        if self._running:
            raise DriverError(
                "an operation waited for the device while it ran on the device",
                "synchronise from the host program, not from inside a launch's fn",
            )
        usual, self.schedule = self.schedule, schedule or self.schedule
        try:
            while not (until.done if isinstance(until, Node) else until is not None and until()):
                if not self.step():
                    break
        finally:
            self.schedule = usual
        self.check()

    def check(self) -> None:
        """Raise `DriverError` if a node failed earlier."""
        if self.fault is not None:
            raise DriverError(
                f"an operation that ran earlier failed: {self.fault!r}",
                "the error is sticky, as on CUDA: fix the operation named in the cause and use a new device",
                fault=repr(self.fault),
            ) from self.fault

    def _run(self, node: Node) -> None:
        self._running = True
        try:
            if self.fault is None:
                self.execute(node)
        except BaseException as error:
            error.add_note(f"raised by {node!r}" + "".join(f"\n  enqueued at {frame}" for frame in node.site))
            self.fault = error
            if not isinstance(error, Exception):
                raise
        finally:
            node.done = True
            node.fn = None
            node.deps = ()
            self.executed += 1
            self._running = False


def run(node: Node) -> None:
    """Run a node's function, if it has one."""
    if node.fn is not None:
        node.fn()
