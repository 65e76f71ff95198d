"""The seam: `workspace.driver.Driver` on a simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from workspace.driver import Graph
from workspace.errors import StreamError
from workspace.simulated.buffer import Buffer
from workspace.simulated.streams import FIRST_HANDLE, Stream

if TYPE_CHECKING:
    from workspace.simulated.device import Device


class SimulatedDriver:
    """What the framework asks of a device, answered by a `workspace.simulated.Device`.

    Queries, allocations, frees and synchronisations run relaxed, as the seam promises: they break no capture
    of another stream or thread.
    """

    name = "simulated"

    def __init__(self, simulated: Device) -> None:
        self.simulated = simulated
        self.device = torch.device("cpu")
        self.attributes = simulated.judge is not None
        # Bound once: every acquire asks, and each layer in between costs as much as the answer.
        self.current_stream: Callable[[], int] = simulated.streams.current

    # -- streams -------------------------------------------------------------------------------------------

    def set_stream(self, stream: int) -> None:
        self.simulated.set_stream(stream)

    def new_stream(self, name: str) -> int:
        return self.simulated.new_stream(name)

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
            raise StreamError(f"{stream!r} is not a stream", "pass a stream object, a raw handle or a key")
        with self.simulated.lock:
            if number < FIRST_HANDLE:
                return self.simulated.streams[number].key
            state = self.simulated.streams.by_handle(number)
            if state.capture is not None:
                raise StreamError(
                    f"raw stream {number:#x} is capturing and cannot be identified",
                    "use the stream once before the capture begins, or capture on a stream from ws.stream()",
                    handle=number,
                )
            return self.simulated.stream_id(number)

    def owned(self, stream: int) -> bool:
        with self.simulated.lock:
            return not self.simulated.streams[stream].handle

    def capture_of(self, stream: int) -> int:
        return self.simulated.capture_of(stream)

    # -- events --------------------------------------------------------------------------------------------

    def new_event(self) -> int:
        return self.simulated.new_event()

    def free_event(self, event: int) -> None:
        self.simulated.free_event(event)

    def record(self, event: int, stream: int) -> None:
        self.simulated.record(event, stream)

    def wait(self, event: int, stream: int) -> None:
        self.simulated.wait(event, stream)

    def done(self, event: int) -> bool:
        with self.simulated.relaxed():
            return self.simulated.query(event)

    def synchronize_event(self, event: int) -> None:
        with self.simulated.relaxed():
            self.simulated.synchronize_event(event)

    def synchronize(self, stream: int | None = None) -> None:
        with self.simulated.relaxed():
            self.simulated.synchronize(stream)

    # -- memory --------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int, stream: int) -> Buffer:
        return self.simulated.alloc(nbytes, stream)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int) -> Any:
        return self.simulated.empty(shape, dtype, stream)

    def record_use(self, tensor: Any, stream: int) -> None:
        self.simulated.record_stream(tensor, stream)

    def memset(self, address: int, nbytes: int, value: int, stream: int) -> None:
        self.simulated.memset(address, nbytes, value, stream)

    def tensor(
        self,
        buffer: Any,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        on_death: Callable[[], None] | None = None,
    ) -> Any:
        return self.simulated.tensor(buffer, offset, shape, dtype, on_death)

    def address_of(self, tensor: Any) -> int:
        return tensor.data_ptr()

    def owner_of(self, address: int, nbytes: int, owner: str) -> None:
        self.simulated.label_range(address, nbytes, owner)

    def trim(self) -> None:
        self.simulated.empty_cache()

    # -- captures and graphs -------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> int:
        return self.simulated.begin_capture(stream)

    def end_capture(self, stream: int) -> Graph:
        return self.simulated.end_capture(stream)

    def abort_capture(self, stream: int) -> None:
        self.simulated.abort_capture(stream)

    def on_graph_release(self, graph: Any, callback: Callable[[], None]) -> None:
        graph.on_release(callback)

    def watch_captures(
        self,
        beginning: Callable[[int], None],
        began: Callable[[int, int], None],
        ended: Callable[[int, int, Graph | None], None],
    ) -> None:
        self.simulated.watch_captures(beginning, began, ended)
