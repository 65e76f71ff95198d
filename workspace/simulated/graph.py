"""Captured graphs: nodes and edges, replayed as branches of the launching stream."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from workspace.errors import GraphError
from workspace.simulated.blocks import PrivatePool
from workspace.simulated.frontier import Conflict
from workspace.simulated.node import Node, Range
from workspace.simulated.order import Point

if TYPE_CHECKING:
    from workspace.simulated.capturing import Capturing


class Resources:
    """What a graph holds until it is destroyed: its private pool, and whoever wants to know."""

    def __init__(self, bury: Callable[[PrivatePool], None], private: PrivatePool) -> None:
        self._bury = bury
        self.private = private
        self.callbacks: list[Callable[[], None]] = []
        self.released = False

    def release(self) -> None:
        """Let go, once; may run in a finaliser, so it takes no lock."""
        if not self.released:
            self.released = True
            self._bury(self.private)
            callbacks, self.callbacks = self.callbacks, []
            for callback in callbacks:
                callback()


class Record:
    """What reports need of a graph. Logged launches keep it, and not the graph, which can then be collected."""

    def __init__(self, name: str, nodes: list[Node]) -> None:
        self.name = name
        self.nodes = nodes

    def touching(self, start: int, end: int, write: bool) -> Node:
        """The last node that writes (or reads) some of the bytes."""
        for node in reversed(self.nodes):
            for address, nbytes in node.writes if write else node.reads:
                if address < end and start < address + nbytes:
                    return node.graph.touching(start, end, write) if node.graph is not None else node
        raise GraphError(f"{self.name} touches nothing in [{start:#x}, {end:#x})", "ask for bytes of its footprint")


class SimulatedGraph:
    """An instantiated graph. `Device.end_capture` makes it.

    Attributes
    ----------
    name
        For reports.
    capture
        Identity of the capture it came from.
    nodes
        Operations in the order of their capture, which is a topological one.
    reads, writes
        Bytes the whole graph reads and does not write, and bytes it writes; each as merged ranges.
    record
        What reports need of it.
    conflicts
        Races between its own nodes.
    end
        Where its last launch ended: launches of one graph never overlap (``cudaGraphLaunch``).
    """

    def __init__(
        self,
        device: Capturing,
        capture: int,
        nodes: list[Node],
        conflicts: list[Conflict],
        private: PrivatePool,
    ) -> None:
        self._device = device
        self.capture = capture
        self.name = f"graph {capture}"
        self.nodes = nodes
        self.record = Record(self.name, nodes)
        self.conflicts = conflicts
        self.functions = [node.fn for node in nodes if node.fn is not None]
        self.writes = union(extent for node in nodes for extent in node.writes)
        self.reads = subtract(union(extent for node in nodes for extent in node.reads), self.writes)
        self.end: Point | None = None
        self.last: Node | None = None
        self._resources = Resources(device.allocator.dying.append, private)
        self._finalizer = weakref.finalize(self, self._resources.release)
        self._finalizer.atexit = False

    @property
    def edges(self) -> list[tuple[Node, Node]]:
        """Each (before, after) dependency that was captured."""
        return [(dep, node) for node in self.nodes for dep in node.deps]

    @property
    def released(self) -> bool:
        """Whether `reset` was called."""
        return self._resources.released

    @property
    def pool(self) -> PrivatePool:
        """The caching allocator's private pool it was captured with (``CUDAGraph.pool``)."""
        return self._resources.private

    def launch(self, stream: int) -> None:
        """Enqueue the graph on a stream; captured as a child graph when the stream is capturing."""
        self._device.launch_graph(self, stream)

    def run(self) -> None:
        """Run every node in order."""
        for fn in self.functions:
            fn()

    def reset(self) -> None:
        """Destroy the graph; what waits for its release is told once the last launch is through."""
        self._device.destroy_graph(self, self._resources.release)

    def on_release(self, callback: Callable[[], None]) -> None:
        """Call back once when the graph is destroyed or collected."""
        if self._resources.released:
            raise GraphError(f"{self.name} is already released", "register before graph.reset()")
        self._resources.callbacks.append(callback)


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Disjoint, sorted ranges that cover the same bytes."""
    merged: list[list[int]] = []
    for address, nbytes in sorted(ranges):
        if merged and address <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], address + nbytes)
        else:
            merged.append([address, address + nbytes])
    return tuple((start, end - start) for start, end in merged)


def subtract(ranges: tuple[Range, ...], holes: tuple[Range, ...]) -> tuple[Range, ...]:
    """Bytes of `ranges` outside `holes`; both disjoint and sorted."""
    left: list[Range] = []
    at = 0
    for address, nbytes in ranges:
        start, end = address, address + nbytes
        while at < len(holes) and holes[at][0] + holes[at][1] <= start:
            at += 1
        index = at
        while index < len(holes) and holes[index][0] < end:
            if holes[index][0] > start:
                left.append((start, holes[index][0] - start))
            start = max(start, holes[index][0] + holes[index][1])
            index += 1
        if start < end:
            left.append((start, end - start))
    return tuple(left)
