"""The seam: `workspace.driver.Driver` on a simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workspace.errors import StreamError
from workspace.simulated.graph import SimulatedGraph
from workspace.simulated.memory import host_bytes
from workspace.simulated.streams import FIRST_HANDLE, Stream

if TYPE_CHECKING:
    from workspace.driver import Graph, Ranges
    from workspace.simulated.device import Device


class SimulatedDriver:
    """What the framework asks of a device, answered by a `workspace.simulated.Device`.

    Queries, allocations, frees and synchronisations run relaxed, as the seam promises: they break no capture
    of another stream or thread.
    """

    name = "simulated"
    ranges: Ranges | None = None

    def __init__(self, simulated: Device) -> None:
        self.simulated = simulated
        self._keys: dict[int, int] = {}  # of raw streams, by handle, as they were identified last
        self.device = torch.device("cpu")
        self.attributes = simulated.judge is not None
        self.readable = simulated.memory.kind == "host"
        # Verbs that need no relaxed mode are the device's own; every acquire asks for the current stream, and each
        # layer in between costs as much as the answer.
        self.current_stream: Callable[[], int] = simulated.streams.current
        self.set_stream = simulated.streams.set_current
        self.new_stream = simulated.new_stream
        self.capture_of = simulated.capture_of
        self.new_event = simulated.new_event
        self.free_event = simulated.free_event
        self.record = simulated.record
        self.wait = simulated.wait
        self.alloc = simulated.alloc
        self.empty = simulated.empty
        self.memset = simulated.memset
        self.tensor = simulated.tensor
        self.owner_of = simulated.lend
        self.trim = simulated.empty_cache
        self.map = simulated.map
        self.reclaim = simulated.reclaim
        self.end_capture = simulated.end_capture
        self.abort_capture = simulated.abort_capture
        self.watch_captures = simulated.watch_captures

    def begin_capture(self, stream: int, share: Graph | None = None) -> int:
        pool = share.pool if isinstance(share, SimulatedGraph) and not share.released else None
        return self.simulated.begin_capture(stream, pool=pool)

    def settle(self) -> None:
        """A graph is gone once its last launch is through."""
        self.synchronize()

    def poll(self) -> None:
        """Nothing waits: a graph's callbacks run when it goes."""

    def stream_key(self, stream: object) -> int:
        """Key of a `Stream`, an object with ``key`` or ``__cuda_stream__``, a raw handle or a key."""
        if stream is None:
            raise StreamError("None is not a stream", "omit the argument to mean the caller's current stream")
        if isinstance(stream, Stream) and stream.device is not self.simulated:
            raise StreamError(f"{stream} belongs to another device", "pass a stream of this workspace's device")
        number: Any = stream
        if hasattr(stream, "__cuda_stream__"):
            number = stream.__cuda_stream__()[1]
        elif hasattr(stream, "key"):
            number = stream.key
        if not isinstance(number, int) or isinstance(number, bool):
            named = f"ws.stream({stream!r})" if isinstance(stream, str) and stream else "ws.stream(name)"
            raise StreamError(
                f"{stream!r} is not a stream",
                f"pass {named}, an object with __cuda_stream__ or a raw handle; omit the argument for the caller's "
                "current stream",
            )
        with self.simulated.lock:
            if number < FIRST_HANDLE:
                return self.simulated.streams[number].key
            state = self.simulated.streams.by_handle(number)
            if state.capture is None:
                key = self._keys[number] = self.simulated.stream_id(number)
                return key
            # To ask for its id would break the capture. One that captures was not destroyed since it was asked last.
            if self._keys.get(number) != state.key:
                raise StreamError(
                    f"raw stream {number:#x} is capturing and cannot be identified",
                    "use the stream once before the capture begins, or capture on a stream from ws.stream()",
                    handle=number,
                )
            return state.key

    def owned(self, stream: int) -> bool:
        """Raw streams can be destroyed, or have been; the default stream and those of `new_stream` cannot."""
        with self.simulated.lock:
            state = self.simulated.streams.get(stream)
            return state is not None and not state.handle

    def done(self, event: int) -> bool:
        with self.simulated.relaxed():
            return self.simulated.query(event)

    def synchronize_event(self, event: int) -> None:
        with self.simulated.relaxed():
            self.simulated.synchronize_event(event)

    def synchronize(self, stream: int | None = None) -> None:
        """Block the host until a stream is idle, or with None all are; those that capture are left out."""
        simulated = self.simulated
        with simulated.relaxed(), simulated.lock:
            if stream is not None or not simulated.captures:
                simulated.synchronize(stream)
                return
            for key, state in list(simulated.streams.items()):
                if state.capture is None:
                    simulated.synchronize(key)

    def record_use(self, tensor: Any, stream: int) -> bool:
        return self.simulated.record_stream(tensor, stream)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Any memory of the host: the device copies when its schedule says so."""
        return host_bytes(nbytes)

    def upload(self, host: torch.Tensor, offset: int, tensor: Any, stream: int) -> None:
        self.simulated.upload(host, offset, tensor.data_ptr(), tensor.numel() * tensor.element_size(), stream)

    def read(self, buffer: Any, offset: int, nbytes: int) -> bytes:
        """Bytes of a buffer after the device has gone idle. Raises `Unsupported` for virtual memory."""
        with self.simulated.relaxed():
            return self.simulated.read(buffer, offset, nbytes)

    def address_of(self, tensor: Any) -> int:
        return tensor.data_ptr()

    def on_graph_release(self, graph: Any, callback: Callable[[], None]) -> None:
        graph.on_release(callback)
