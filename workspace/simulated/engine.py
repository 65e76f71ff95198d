"""Enqueueing: every operation of the device goes through `Engine.submit`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from workspace.simulated.captures import Captures
from workspace.simulated.events import Stamp
from workspace.simulated.judge import Judge
from workspace.simulated.node import Node, Range
from workspace.simulated.order import Clock
from workspace.simulated.queue import NodeQueue
from workspace.simulated.schedule import Schedule
from workspace.simulated.sites import call_site
from workspace.simulated.streams import DEFAULT, StreamState, StreamTable

if TYPE_CHECKING:
    from workspace.simulated.graph import SimulatedGraph

Execution = Literal["immediate", "deferred"]


class Engine:
    """Streams, their order, the queue and the judge of one device. Everything happens under one lock.

    In immediate execution a node runs when it is submitted. In deferred execution it waits in `queue`; see
    `workspace.simulated.device` for how an executor plugs in.
    """

    def __init__(self, execution: Execution, log: bool, sites: bool, ahead: int, schedule: Schedule | None) -> None:
        self.lock = threading.RLock()
        self.execution = execution
        self.deferred = execution == "deferred"
        self.sites = sites
        self.ahead = ahead
        self.counters: Counter[str] = Counter()
        self.queue = NodeQueue(schedule)
        self.streams = StreamTable(self)
        self.host = self.streams.host
        self.captures = Captures(self.streams)
        self.judge = Judge(self.streams.name_of) if log else None
        self.tick = 0
        self._complete = 0

    def submit(
        self,
        state: StreamState,
        kind: str,
        label: str,
        reads: tuple[Range, ...] = (),
        writes: tuple[Range, ...] = (),
        fn: Callable[[], Any] | None = None,
        deps: tuple[Node, ...] = (),
        graph: SimulatedGraph | None = None,
    ) -> Node:
        """Enqueue a node on a stream: run it, queue it, or add it to the stream's capture."""
        self.tick += 1
        if state.capture is not None:
            capture = self.captures.valid(state.capture, state.key)
            node = capture.append(state.key, kind, label, reads, writes, fn)
            node.tick, node.graph = self.tick, graph.record if graph is not None else None
            if self.sites:
                node.site = call_site()
            return node
        if state.seen != self.host.version or self.streams.blocking:
            deps += self.enter(state)
        state.position += 1
        node = Node(state.key, state.position, state.clock, kind, label, reads, writes, fn)
        node.tick = self.tick
        if graph is not None:
            node.graph = graph.record if graph is not None else None
        if self.sites:
            node.site = call_site()
        if self.judge is not None:
            self.judge.log.add(node)
            if self.judge.log.crowded:
                self.compact(self.judge)
        if self.deferred:
            node.deps = deps
            self.queue.push(node)
        else:
            node.done = True
            if fn is not None:
                node.fn = None  # a finished node keeps nothing alive
                fn()
        return node

    def state(self, stream: int | None) -> StreamState:
        """A stream by key, or the calling thread's current one."""
        return self.streams[self.streams.current() if stream is None else stream]

    def enter(self, state: StreamState) -> tuple[Node, ...]:
        """Order the stream's next operation after what the host knows, and after implicit joins."""
        if state.seen != self.host.version:
            self.host.enter(state)
        if self.streams.blocking and (state.blocking or state.key == DEFAULT):
            return self._join_implicitly(state)
        return ()

    def stamp(self, key: int) -> Stamp | None:
        """The present end of a stream; None if the stream is gone."""
        state = self.streams.get(key)
        if state is None:
            return None
        if state.seen != self.host.version or self.streams.blocking:
            deps = self.enter(state)
            if self.deferred and deps:  # on the default stream, the record itself waits for blocking streams
                node = Node(key, state.position, state.clock, "wait", "implicit wait")
                node.deps = deps
                self.queue.push(node)
        last = self.queue.last(key) if self.deferred else None
        return Stamp(key, state.position, state.clock, self.tick, last)

    def reached(self, stamp: Stamp) -> bool:
        """Whether the device got to a stamp."""
        if self.deferred:
            return stamp.node is None or stamp.node.done
        return stamp.tick <= max(self._complete, self.tick - self.ahead)

    def advance(self) -> None:
        """Time passes while the host polls: one node runs."""
        if self.deferred:
            self.queue.step()
        else:
            self.tick += 1

    def await_stamp(self, stamp: Stamp) -> None:
        """Block the host until the device gets to a stamp."""
        if stamp.node is not None:
            self.queue.drain(stamp.node)
        self._complete = max(self._complete, stamp.tick)

    def await_all(self) -> None:
        """Block the host until the device is idle."""
        self.queue.drain()
        self._complete = self.tick
        for point in (*self.streams.departed, *(state.point() for state in self.streams.values())):
            self.host.learn(point)
        self.streams.departed.clear()

    def _join_implicitly(self, state: StreamState) -> tuple[Node, ...]:
        """The legacy default stream and blocking streams wait for each other."""
        others = self.streams.blocking if state.key == DEFAULT else [self.streams[DEFAULT]]
        if state.key == DEFAULT:
            self.captures.refuse_legacy()
        for other in others:
            if other.seen != self.host.version:
                self.host.enter(other)
            state.learn(other.point())
        tails = (self.queue.last(other.key) for other in others)
        return tuple(tail for tail in tails if tail is not None)

    def compact(self, judge: Judge) -> None:
        """Drop history that cannot race any more, and destroyed streams that nothing mentions."""
        judge.log.compact(self.host.clock)
        mentioned = judge.streams()
        self.streams.forget(mentioned)
        kept = mentioned | self.streams.keys()
        self.host.clock = within(self.host.clock, kept)
        for state in self.streams.values():
            state.clock = within(state.clock, kept)
        for point in self.streams.departed:
            point.clock = within(point.clock, kept)


def within(clock: Clock, kept: set[int]) -> Clock:
    """A clock that mentions no other streams."""
    return {key: at for key, at in clock.items() if key in kept}
