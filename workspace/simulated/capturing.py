"""Captures and graphs: the verbs that begin, end and replay them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from workspace import watching
from workspace.errors import CaptureError, GraphError
from workspace.simulated.blocks import PrivatePool
from workspace.simulated.capture import Capture, Mode
from workspace.simulated.graph import SimulatedGraph
from workspace.simulated.node import Node
from workspace.simulated.storage import Storage
from workspace.simulated.streams import StreamState


class Capturing(Storage):
    """The device's captures and graphs."""

    def __init__(self, *storage: Any) -> None:
        super().__init__(*storage)
        self._watchers: list[tuple[Callable[[int], None], Callable[[int, int], None], Callable[..., None]]] = []

    def begin_capture(self, stream: int, mode: Mode = "global", pool: PrivatePool | None = None) -> int:
        """Begin a capture on a stream; return its identity. `pool`: that of an earlier graph, as ``pool=`` in torch."""
        watching.use(self)
        for beginning, _, _ in self._watchers:
            beginning(stream)
        with self.lock:
            self.counters["begin_capture"] += 1
            begun = self.captures.begin(self.streams[stream], mode, self.judge is not None)
            if pool is not None:
                pool.users += 1
                begun.private = pool
            capture = begun.id
        for _, began, _ in self._watchers:
            began(stream, capture)
        return capture

    def end_capture(self, stream: int) -> SimulatedGraph:
        """The graph of the capture that began on the stream. Raises `CaptureBroken` if it is not valid."""
        capture = self.streams[stream].capture
        graph = None
        try:
            with self.lock:
                self.counters["end_capture"] += 1
                ended = self.captures.end(self.streams[stream])
                graph = SimulatedGraph(self, ended.id, ended.nodes, ended.conflicts, ended.private)
        finally:
            if capture is not None and not capture.open:
                self._capture_over(capture, graph)
        return graph

    def abort_capture(self, stream: int) -> None:
        """End a capture and keep nothing of it."""
        with self.lock:
            self.counters["end_capture"] += 1
            capture = self.streams[stream].capture
            if capture is None:
                raise CaptureError(f"stream {stream} is not capturing", "abort a capture on one of its streams")
            self.captures.close(capture)
        self._capture_over(capture, None)

    def capture_of(self, stream: int) -> int:
        """Identity of the capture a stream is part of, 0 outside."""
        capture = self.streams[stream].capture
        return 0 if capture is None else capture.id

    def relaxed(self) -> AbstractContextManager[None]:
        """In it, calls of this thread break no capture of another (``cuThreadExchangeStreamCaptureMode``)."""
        return self.captures.relaxed

    def refuse_in_capture(self, stream: int, what: str) -> None:
        """Refuse something CUDA cannot capture, and invalidate the capture the stream is part of, if any."""
        with self.lock:
            self.captures.refuse_stream(self.streams[stream], what)

    def watch_captures(
        self,
        beginning: Callable[[int], None],
        began: Callable[[int, int], None],
        ended: Callable[[int, int, Any], None],
    ) -> None:
        """See `workspace.driver.Driver.watch_captures`."""
        self._watchers.append((beginning, began, ended))

    def _capture_over(self, capture: Capture, graph: SimulatedGraph | None) -> None:
        with self.lock:
            if graph is None:
                self.allocator.release_pool(capture.private)
            if not self.captures:
                self.allocator.captures_over()
        for _, _, ended in self._watchers:
            ended(capture.origin, capture.id, graph)

    def launch_graph(self, graph: SimulatedGraph, stream: int) -> None:
        """Enqueue a whole graph: its branches start at the stream's end, and the stream goes on after them.

        To the judge a replay is one operation with the graph's bytes, because nothing outside is ordered with
        part of one; what races inside was found at the capture.
        """
        watching.use(self)
        with self.lock:
            self.counters["graph_launch"] += 1
            state = self.streams[stream]
            if graph.released:
                raise GraphError(f"{graph.name} was launched after reset", "keep the graph, or capture it again")
            if state.capture is not None:
                state.capture.conflicts += graph.conflicts
                self._one(state, graph, graph.run)
                return
            self.enter(state)
            if graph.end is not None:
                state.learn(graph.end)
            if self.judge is not None:
                self.judge.replayed(graph)
            if self.deferred:
                self._expand(state, graph)
            else:
                self._one(state, graph, graph.run if graph.functions else None)
            graph.end = state.point()

    def destroy_graph(self, graph: SimulatedGraph, release: Callable[[], None]) -> None:
        """Release what a graph holds, once its last launch is through."""
        with self.lock:
            self.counters["graph_reset"] += 1
            last = graph.last
            if last is not None and not last.done:
                last.fn = release
                return
        release()

    def _one(
        self,
        state: StreamState,
        graph: SimulatedGraph,
        fn: Callable[[], None] | None,
        deps: tuple[Node, ...] = (),
    ) -> Node:
        return self.submit(state, "graph", graph.name, graph.reads, graph.writes, fn, deps, graph)

    def _expand(self, state: StreamState, graph: SimulatedGraph) -> None:
        """Queue each node on a stream of its branch, between a start and an end on the launch stream."""
        start = self._one(state, graph, None, (graph.last,) if graph.last is not None else ())
        lanes: dict[int, int] = {}
        copies: dict[Node, Node] = {}
        for node in graph.nodes:
            lane = lanes.get(node.stream)
            if lane is None:
                lane = lanes[node.stream] = self.streams.fresh_key()
            copy = Node(lane, node.position, start.clock, node.kind, node.label, node.reads, node.writes, node.fn)
            copy.site, copy.graph = node.site, graph.record
            copy.deps = (start, *(copies[dep] for dep in node.deps))
            copies[node] = copy
            self.queue.push(copy)
        graph.last = Node(state.key, state.position, state.clock, "graph", f"{graph.name} end")
        graph.last.deps = tuple(copies.values())
        self.queue.push(graph.last)
