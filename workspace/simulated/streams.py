"""Streams: keys that are never reused, raw handles that are, and each thread's current stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from workspace import watching
from workspace.errors import StreamError
from workspace.simulated.order import Host, Point, Track

if TYPE_CHECKING:
    from workspace.simulated.capture import Capture

DEFAULT = 0
FIRST_HANDLE = 1 << 40
HANDLE_STRIDE = 0x1000


class StreamState(Track):
    """A stream of the device.

    Attributes
    ----------
    handle
        Its raw handle if it was made as a raw stream, else 0.
    blocking
        Whether it synchronises implicitly with the default stream (``cudaStreamDefault``; torch's streams do
        not).
    capture
        The capture in progress it is part of.
    """

    __slots__ = ("blocking", "capture", "handle", "name")

    def __init__(self, key: int, name: str, host: Host, handle: int = 0, blocking: bool = False) -> None:
        super().__init__(key, host.clock, host.version)
        self.name = name
        self.handle = handle
        self.blocking = blocking
        self.capture: Capture | None = None


class Stream:
    """A stream as an object, for callers that pass streams around. ``device.stream(key)`` makes one."""

    __slots__ = ("device", "key")

    def __init__(self, device: Any, key: int) -> None:
        self.device = device
        self.key = key

    def __repr__(self) -> str:
        return f"simulated.Stream({self.key})"


class _Current(threading.local):
    key = DEFAULT


class StreamTable(dict[int, StreamState]):
    """All streams of a device, by key; one that is not there is a `StreamError`."""

    def __init__(self, device: object) -> None:
        super().__init__()
        self._device = device
        self.host = Host()
        self[DEFAULT] = StreamState(DEFAULT, "default", self.host)
        self._by_handle: dict[int, StreamState] = {}
        self._free_handles: list[int] = []
        self._local = _Current()
        # A call of C alone: every acquire makes it.
        self.current: Callable[[], int] = partial(getattr, self._local, "key")
        self._next = 1
        self.blocking: list[StreamState] = []
        self.departed: list[Point] = []
        """Ends of destroyed streams whose work the host has not seen complete."""
        self._names: dict[int, str] = {DEFAULT: "default"}

    def __missing__(self, key: Any) -> StreamState:
        known = "was destroyed" if isinstance(key, int) and 0 < key < self._next else "is not known"
        raise StreamError(
            f"stream {key!r} {known}",
            "pass ws.stream(name), the raw handle of a stream that exists, or a key that device.new_stream() gave",
            stream=key,
        )

    def name_of(self, key: int) -> str:
        """The name a stream has or had."""
        return self._names.get(key, f"stream {key}")

    def set_current(self, stream: int) -> None:
        watching.use(self._device)
        self._local.key = self[stream].key

    def add(self, name: str, raw: bool = False, blocking: bool = False) -> StreamState:
        """A new stream. It comes after what the host has seen complete, and after nothing else."""
        key = self.fresh_key()
        handle = 0
        if raw:
            unused = FIRST_HANDLE + HANDLE_STRIDE * len(self._by_handle)
            handle = self._free_handles.pop() if self._free_handles else unused
        state = StreamState(key, name or f"stream {key}", self.host, handle, blocking)
        self[key] = state
        if raw:
            self._by_handle[handle] = state
        if blocking:
            self.blocking.append(state)
        self._names[key] = state.name
        return state

    def fresh_key(self) -> int:
        """A key nothing else has or will have."""
        self._next += 1
        return self._next - 1

    def by_handle(self, handle: int) -> StreamState:
        state = self._by_handle.get(handle)
        if state is None:
            raise StreamError(
                f"{handle:#x} is not the handle of a raw stream that exists",
                "pass ws.stream(name), or the handle of one that lives: it was destroyed, or is another device's",
                handle=handle,
            )
        return state

    def remove(self, state: StreamState) -> None:
        """Destroy a raw stream; its handle is the next one to be handed out again."""
        self.departed.append(state.point())
        del self[state.key], self._by_handle[state.handle]
        self._free_handles.append(state.handle)
        if state.blocking:
            self.blocking.remove(state)

    def destroyed(self) -> int:
        """How many streams that are gone still have a name."""
        return len(self._names) - len(self)

    def forget(self, mentioned: set[int]) -> None:
        """Drop what is kept of destroyed streams that no report can mention."""
        self._names = {key: name for key, name in self._names.items() if key in self or key in mentioned}
        self.departed = [point for point in self.departed if point.stream in mentioned]
