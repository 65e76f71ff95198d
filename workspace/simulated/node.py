"""One operation on a stream: what the queue orders, runs and logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workspace.simulated.order import Clock

if TYPE_CHECKING:
    from workspace.simulated.graph import Record

Range = tuple[int, int]
"""(first address, bytes)."""


class Node:
    """An enqueued operation.

    Attributes
    ----------
    stream, position
        Where it stands: the stream's key and its place in that stream (or, in a capture, in that branch).
    clock
        What the stream knew of other streams when the node was enqueued; never mutated.
    label, site
        For reports: the caller's label and, if the device records call sites, the frames of the call.
    tick
        Its number among all operations the host enqueued or captured.
    kind
        ``launch``, ``record``, ``wait``, ``memset``, ``upload`` or ``graph``.
    fn
        Runs when the node runs; dropped afterwards, so that a finished node keeps nothing alive.
    reads, writes
        Byte ranges.
    deps
        Nodes of other streams that must be done first. Nodes of one stream run in order without saying so.
    graph
        What reports need of the replayed graph, for a node that stands for a whole replay.
    """

    deps: tuple[Node, ...] = ()
    done = False
    tick = 0
    site: tuple[Any, ...] = ()
    graph: Record | None = None

    def __init__(
        self,
        stream: int,
        position: int,
        clock: Clock,
        kind: str,
        label: str,
        reads: tuple[Range, ...] = (),
        writes: tuple[Range, ...] = (),
        fn: Callable[[], Any] | None = None,
    ) -> None:
        self.stream = stream
        self.position = position
        self.clock = clock
        self.kind = kind
        self.label = label
        self.reads = reads
        self.writes = writes
        self.fn = fn

    def __repr__(self) -> str:
        return f"Node({self.kind} {self.label!r}, stream {self.stream} at {self.position})"
