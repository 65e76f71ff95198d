"""The seam between the framework and a device.

A driver speaks in integers: a *stream key* names a stream for as long as it exists, an *event* is a handle the
driver made. Everything above this protocol (clocks, fences, pool, captures) is shared by every device; there are
two implementations, ``workspace.cuda`` and ``workspace.simulated``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Buffer(Protocol):
    """Bytes obtained from the framework's own allocator; dropping the last reference gives them back."""

    address: int
    nbytes: int


class Mapping(Buffer, Protocol):
    """Bytes at addresses that stay reserved while there is no memory behind them."""

    mapped: bool

    def unmap(self) -> None:
        """Give the memory back to the device, which must be idle; what it held is lost."""

    def remap(self) -> None:
        """Put memory behind the addresses again, with unspecified contents. Raises `OutOfMemory`: nothing changed."""


class Ranges(Protocol):
    """Named ranges of host time that a profiler shows (NVTX); one may end on another thread than it began on."""

    def range_start(self, msg: str, /) -> int:
        """Begin a range; returns its handle."""

    def range_end(self, range_id: int, /) -> None:
        """End the range of a handle."""


class Graph(Protocol):
    """One instantiated captured graph (one segment of a breakable graph)."""

    def launch(self, stream: int) -> None:
        """Enqueue the graph on a stream."""

    def reset(self) -> None:
        """Destroy the graph; callbacks registered with `Driver.on_graph_release` fire."""


class Driver(Protocol):
    """What the framework asks of a device.

    No verb may synchronise the host unless its name says so. Every query, allocation, free and synchronisation
    runs so that a capture in progress on *another* stream or thread survives it (on CUDA: under
    ``cuThreadExchangeStreamCaptureMode(relaxed)``).
    """

    name: str
    device: torch.device
    attributes: bool
    """Whether `owner_of` has an effect, so that callers can skip it."""
    readable: bool
    """Whether memory has contents that `read` can return; virtual memory has none."""
    ranges: Ranges | None
    """None on a device that no profiler looks at."""

    # -- streams -------------------------------------------------------------------------------------------
    def current_stream(self) -> int:
        """Key of the calling thread's current stream (legal during captures)."""

    def set_stream(self, stream: int) -> None:
        """Make a stream the calling thread's current one."""

    def new_stream(self, name: str) -> int:
        """Create a stream the framework owns and never destroys; return its key."""

    def stream_key(self, stream: object) -> int:
        """Key of a stream given as the framework's object, ``cuda.core`` object, raw handle or key.

        A raw handle is identified anew at each call: handles are reused after destruction, keys are not.
        Raises `StreamError` for None, for a stream of another device, and for a raw stream that is capturing.
        """

    def owned(self, stream: int) -> bool:
        """Whether the stream lives as long as the process, so that an event on it may be recorded late."""

    def capture_of(self, stream: int) -> int:
        """Identity of the capture the stream is part of, 0 when it is not capturing.

        Also of a capture that broke, until it is ended.
        """

    # -- events --------------------------------------------------------------------------------------------
    def new_event(self) -> int: ...

    def free_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int, stream: int) -> None:
        """Make later work on the stream wait for the event's most recent record (none: no effect)."""

    def done(self, event: int) -> bool:
        """Whether everything before the event's last record is complete. Never called on captured events."""

    def synchronize_event(self, event: int) -> None: ...

    def synchronize(self, stream: int | None = None) -> None:
        """Block the host until a stream, or with None the device, is idle.

        While a capture is open, None means every never-destroyed stream that is not capturing.
        """

    # -- memory --------------------------------------------------------------------------------------------
    def alloc(self, nbytes: int, stream: int) -> Buffer:
        """Bytes from the framework's caching allocator, for use on `stream`. Raises `OutOfMemory`."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int) -> Any:
        """A tensor with a block of its own from the framework's allocator (``torch.empty``), for use on `stream`."""

    def map(self, nbytes: int) -> Mapping:
        """Bytes straight from the device, for any stream. Raises `OutOfMemory`, and `Unsupported` where it cannot.

        Dropping the last reference gives them back at the next `map`, `trim` or `reclaim`.
        """

    def reclaim(self) -> None:
        """Give back the memory of mappings that are gone; blocks the host until the device is idle if there are any."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of the host, at least one, that the device copies from while the host goes on."""

    def upload(self, host: torch.Tensor, offset: int, tensor: Any, stream: int) -> None:
        """Enqueue, on a stream, a copy of pinned bytes from an offset on to the whole of a contiguous tensor."""

    def record_use(self, tensor: Any, stream: int) -> bool:
        """Tell the framework's allocator that a tensor it owns is used on `stream` (``record_stream``).

        False, and without effect, for memory it did not hand out: a slab's, another device's, the host's.
        """

    def memset(self, address: int, nbytes: int, value: int, stream: int) -> None:
        """Enqueue a fill with one byte value (0..255); captured when the stream is capturing."""

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        """Bytes of a buffer, copied to the host after the device has gone idle (debugging: guard bands).

        Raises `Unsupported` where there are none to read (`readable` is False).
        """

    def tensor(
        self,
        buffer: Buffer,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        on_death: Callable[[], None] | None = None,
    ) -> Any:
        """A contiguous tensor with a storage of its own over ``buffer[offset:]``.

        The buffer stays alive as long as the storage. `on_death` is called from the storage's finaliser, views
        included; it must take no lock and make no device call. With virtual memory, a `VirtualTensor`.
        """

    def address_of(self, tensor: Any) -> int:
        """First byte of a tensor's storage range (its data pointer)."""

    def owner_of(self, address: int, nbytes: int, owner: str, tensors: list[Any] | None = None) -> None:
        """Attribute bytes to an owner in the device's access log (no effect on a device without one).

        `tensors`: those a lease of the bytes hands out. The device may put others over the same bytes in their place,
        so that uses of them are told from uses of what an earlier lease has handed out.
        """

    def trim(self) -> None:
        """Return memory cached by the framework's allocator to the device (``empty_cache``).

        Raises `CaptureError` where it would break an open capture.
        """

    # -- captures and graphs -------------------------------------------------------------------------------
    def begin_capture(self, stream: int, share: Graph | None = None) -> int:
        """Begin a capture on a stream; return its identity.

        `share` is the segment before of one breakable graph, whose allocator pool the new segment uses too.
        """

    def end_capture(self, stream: int) -> Graph: ...

    def abort_capture(self, stream: int) -> None:
        """End a capture that failed, keeping nothing; the stream is usable again."""

    def on_graph_release(self, graph: Graph, callback: Callable[[], None]) -> None:
        """Call back once when the graph's resources are gone (reset or collected).

        From whichever thread next calls `poll`, `alloc`, `trim`, `synchronize` or `begin_capture`, or at once.
        """

    def poll(self) -> None:
        """Run the callbacks of graphs that have gone since the last poll. Makes no device call."""

    def settle(self) -> None:
        """Block the host until graphs that are being destroyed are gone, then `poll`; others are not waited for."""

    def watch_captures(
        self,
        beginning: Callable[[int], None],
        began: Callable[[int, int], None],
        ended: Callable[[int, int, Graph | None], None],
    ) -> None:
        """Register callbacks ``beginning(stream)``, ``began(stream, capture)``, ``ended(stream, capture, graph)``.

        They fire for every capture the process begins through the framework (torch's ``CUDAGraph``, the simulated
        device), including those this library begins, and never while the device holds a lock of its own:
        `beginning` before the stream captures, so that events still owed can be recorded on it; `ended` with None for
        the graph when the capture failed.
        """
