"""Streams and events: the verbs that make order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workspace import watching
from workspace.simulated.engine import Engine
from workspace.simulated.events import EventTable, Stamp
from workspace.simulated.node import Node
from workspace.simulated.streams import Stream

MANY_DESTROYED = 256
"""Destroyed streams between two attempts to forget them."""


class Ordering(Engine):
    """The device's streams and events."""

    def __init__(self, *engine: Any) -> None:
        super().__init__(*engine)
        self.events = EventTable()

    def current_stream(self) -> int:
        """Key of the calling thread's current stream; 0 is the default stream."""
        return self.streams.current()

    def set_stream(self, stream: int) -> None:
        """Make a stream the calling thread's current one."""
        self.streams.set_current(stream)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream the calling thread's current one for a while."""
        before = self.streams.current()
        self.streams.set_current(stream)
        try:
            yield
        finally:
            self.streams.set_current(before)

    def new_stream(self, name: str = "") -> int:
        """Key of a new stream that does not synchronise with the default stream and is never destroyed."""
        with self.lock:
            self.counters["new_stream"] += 1
            return self.streams.add(name).key

    def new_raw_stream(self, name: str = "", blocking: bool = False) -> int:
        """Handle of a new raw stream (``cudaStreamCreate``). Handles of destroyed streams come up again."""
        with self.lock:
            self.counters["new_stream"] += 1
            return self.streams.add(name, raw=True, blocking=blocking).handle

    def destroy_stream(self, handle: int) -> None:
        """Destroy a raw stream; what was enqueued on it still runs."""
        with self.lock:
            state = self.streams.by_handle(handle)
            self.captures.refuse_stream(state, "destruction")
            self.counters["destroy_stream"] += 1
            self.streams.remove(state)
            if self.judge is not None and self.streams.destroyed() % MANY_DESTROYED == 0:
                self.compact(self.judge)

    def stream_id(self, handle: int) -> int:
        """Key of a raw stream (``cuStreamGetId``); breaks a capture the stream is part of, as on CUDA."""
        with self.lock:
            state = self.streams.by_handle(handle)
            self.counters["stream_id"] += 1
            self.captures.refuse_stream(state, "stream id query")
            return state.key

    def stream(self, key: int) -> Stream:
        """A stream as an object."""
        return Stream(self, self.streams[key].key)

    def new_event(self) -> int:
        with self.lock:
            self.counters["new_event"] += 1
            return self.events.add()

    def free_event(self, event: int) -> None:
        with self.lock:
            self.counters["free_event"] += 1
            self.events.remove(event)

    def record(self, event: int, stream: int | None = None) -> None:
        """The event now names the end of the stream; its earlier record is forgotten."""
        watching.use(self)
        with self.lock:
            self.counters["record"] += 1
            state = self.state(stream)
            entry = self.events[event]
            if state.capture is not None:
                self.captures.valid(state.capture, state.key).record(entry, state.key)
            else:
                entry.capture = None
                entry.stamp = self.stamp(state.key)

    def wait(self, event: int, stream: int | None = None) -> None:
        """Later work on the stream comes after the event's last record; without one, nothing happens."""
        watching.use(self)
        with self.lock:
            self.counters["wait"] += 1
            state = self.state(stream)
            entry = self.events[event]
            if state.capture is not None or entry.capture is not None:
                self.captures.wait(state, entry)
            elif entry.stamp is not None:
                self.enter(state)
                state.learn(entry.stamp)
                before = entry.stamp.node
                if before is not None and not before.done:
                    node = Node(state.key, state.position, state.clock, "wait", f"wait for event {event}")
                    node.deps = (before,)
                    self.queue.push(node)

    def query(self, event: int) -> bool:
        """Whether the event is complete; True orders everything enqueued from now on after it."""
        with self.lock:
            self.counters["query"] += 1
            stamp = self._eager(event, "query")
            if stamp is None:
                return True
            done = self.reached(stamp)
            if done:
                self.host.learn(stamp)
            else:
                self.advance()
            return done

    def synchronize_event(self, event: int) -> None:
        """Block the host until the event is complete."""
        with self.lock:
            self.counters["synchronize"] += 1
            stamp = self._eager(event, "synchronisation")
            if stamp is not None:
                self.await_stamp(stamp)
                self.host.learn(stamp)

    def query_stream(self, stream: int) -> bool:
        """Whether the stream is idle; True orders everything enqueued from now on after its work."""
        with self.lock:
            self.counters["query"] += 1
            stamp = self._tail(stream, "query")
            done = self.reached(stamp)
            if done:
                self.host.learn(stamp)
            else:
                self.advance()
            return done

    def synchronize(self, stream: int | None = None) -> None:
        """Block the host until a stream, or with None the device, is idle."""
        with self.lock:
            self.counters["synchronize"] += 1
            if stream is None:
                self.captures.refuse_device("device synchronisation")
                self.await_all()
            else:
                stamp = self._tail(stream, "synchronisation")
                self.await_stamp(stamp)
                self.host.learn(stamp)
            self.queue.check()

    def _eager(self, event: int, verb: str) -> Stamp | None:
        entry = self.events[event]
        self.captures.refuse_captured(entry, f"event {verb}")
        self.captures.refuse_unsafe(f"event {verb}")
        return entry.stamp

    def _tail(self, stream: int, verb: str) -> Stamp:
        state = self.streams[stream]
        self.captures.refuse_stream(state, verb)
        self.captures.refuse_unsafe(f"stream {verb}")
        stamp = self.stamp(stream)
        assert stamp is not None
        return stamp
