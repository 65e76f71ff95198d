"""The CUDA driver: the verbs of `workspace.driver.Driver` on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p
from typing import Any

import torch

from workspace.cuda.events import Events
from workspace.cuda.graph import CapturedGraph
from workspace.cuda.graphs import Graphs
from workspace.cuda.libcuda import LibCuda
from workspace.cuda.mapping import Mapping, Mappings
from workspace.cuda.memory import DeviceBuffer, Memory
from workspace.cuda.streams import Streams
from workspace.cuda.verbs import hot_verbs
from workspace.driver import Buffer, Graph, Ranges
from workspace.errors import CaptureError, DeviceError, GraphError, SizeError, Unsupported


class CudaDriver:
    """Implements `workspace.driver.Driver` through libcuda and torch; make it with `cuda_driver`.

    Parameters
    ----------
    device
        ``"cuda"``, ``"cuda:1"``, an index or a ``torch.device``. Without an index, the current device.

    Raises
    ------
    Unsupported
        When this build of PyTorch has no CUDA, is for ROCm, or libcuda is missing.
    DeviceError
        When there is no such device.
    """

    attributes = False
    readable = True
    ranges: Ranges | None = torch.cuda.nvtx

    def __init__(self, device: torch.device | str | int = "cuda") -> None:
        index = _device_index(device)
        self.device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        torch.cuda.init()
        lib = LibCuda()
        context = _primary_context(lib, index)
        self._index = index
        self._lib = lib
        self._context = context
        self._mappings: Mappings | None = None
        self._streams = Streams(lib, index, context)
        self._several = torch.cuda.device_count() > 1
        self._events = Events(lib, self._streams, context, self._several)
        self._memory = Memory(lib, self._streams, self.device)
        self._kept = self._streams.handles
        self._current = torch._C._cuda_getCurrentStream
        self._graphs = Graphs(lib, self._streams, index, self.current_stream, not self._several)
        # The hot verbs, without a frame in between.
        self.record = self._events.record
        self.wait = self._events.wait
        self.capture_of = self._graphs.capture_of
        self.owned = self._streams.owned
        self.stream_key = self._streams.key
        self.free_event = self._events.free
        self.new_event = self._events.new
        self.done = self._events.done
        self.synchronize_event = self._events.synchronize_event
        self.record_use = self._memory.record_use
        self.__dict__.update(hot_verbs(self, lib, self._streams, index, self._several))
        self._graphs.current = self.current_stream

    # -- streams ---------------------------------------------------------------------------------------------
    def current_stream(self) -> int:
        key: int = self._current(self._index)[0]
        return key if key in self._kept else self._streams.of_torch_id(key)

    def set_stream(self, stream: int) -> None:
        """Make a stream current on this device; the current *device* of the thread stays what it was."""
        wanted = self._streams.torch_id(stream)
        device = torch._C._cuda_getDevice() if self._several else self._index
        torch._C._cuda_setStream(stream_id=wanted, device_index=self._index, device_type=1)
        if device != self._index:
            torch._C._cuda_setDevice(device)

    def new_stream(self, name: str) -> int:
        return self._streams.create()

    def synchronize(self, stream: int | None = None) -> None:
        """Block the host until a stream, or with None the device, is idle.

        While a capture is open, None means every stream that is never destroyed and does not capture: a raw
        stream has to be named then.
        """
        if stream is not None:
            self._events.synchronize_stream(stream)
        elif self._graphs.capturing:
            self._events.synchronize_streams_outside_captures()
        else:
            self._events.synchronize_device()
        self._graphs.releases.poll()

    # -- memory ----------------------------------------------------------------------------------------------
    def alloc(self, nbytes: int, stream: int) -> DeviceBuffer:
        self._graphs.releases.poll()
        if self.capture_of(stream):
            raise CaptureError(
                f"{nbytes} bytes were asked for on stream {stream} while it is capturing",
                "declare and reserve before the capture",
                asked=nbytes,
                stream=stream,
            )
        with self._graphs.on(stream):
            return self._memory.alloc(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int) -> torch.Tensor:
        """``torch.empty`` for use on a stream, inside captures, too: there it comes from the graph's own pool."""
        relaxed = self._graphs.capturing
        if self._graphs.is_current(stream):
            return self._memory.empty(shape, dtype, relaxed)
        with self._graphs.on(stream):
            return self._memory.empty(shape, dtype, relaxed)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        self.synchronize()
        with self._graphs.on(0):
            return self._memory.read(buffer, offset, nbytes)

    def memset(self, address: int, nbytes: int, value: int, stream: int) -> None:
        if not 0 <= value <= 255:
            raise SizeError(f"fill value {value} is no byte", "use 0 to 255", value=value)
        if nbytes:
            self._events.memset(address, nbytes, value, stream)

    def tensor(
        self,
        buffer: Buffer,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        on_death: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        return self._memory.tensor(buffer, offset, shape, dtype, on_death)

    def address_of(self, tensor: Any) -> int:
        if tensor.device != self.device:
            raise DeviceError(
                f"a tensor on {tensor.device} was given to a workspace on {self.device}",
                "use the workspace of its device",
            )
        address: int = tensor.data_ptr()
        return address

    def map(self, nbytes: int) -> Mapping:
        self.reclaim()
        return self._mapped().map(nbytes)

    def reclaim(self) -> None:
        # To wait for the device would break a capture in progress.
        if self._mappings is not None and not self._graphs.capturing:
            self._mappings.reclaim()

    def _mapped(self) -> Mappings:
        if self._mappings is None:
            arguments = self._lib, self._index, self._context
            self._mappings = Mappings(*arguments, self.synchronize, self._trim_cache, self._memory.out_of_memory)
        return self._mappings

    def _trim_cache(self) -> None:
        if not self._graphs.capturing:
            self._memory.trim(False)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return self._memory.pinned(nbytes)

    def upload(self, host: torch.Tensor, offset: int, tensor: Any, stream: int) -> None:
        with self._graphs.on(stream):
            self._memory.upload(host, offset, self.address_of(tensor), tensor.nbytes)

    def owner_of(self, address: int, nbytes: int, owner: str, tensors: list[Any] | None = None) -> None:
        """CUDA keeps no access log."""

    def trim(self) -> None:
        self._graphs.releases.poll()
        self.reclaim()
        self._memory.trim(self._graphs.capturing)

    # -- captures and graphs ---------------------------------------------------------------------------------
    def begin_capture(self, stream: int, share: Graph | None = None, mode: str = "thread_local") -> int:
        """Begin a capture on a stream; return its identity.

        Parameters
        ----------
        stream
            Key of the stream to capture; never the default one.
        share
            An earlier graph whose private pool of torch's allocator this one uses, too: the segments of one
            breakable graph, which are always replayed in order. None: a pool of its own.
        mode
            ``capture_error_mode``. The default lets other threads go on with calls that would break a
            "global" capture.
        """
        if share is not None and not isinstance(share, CapturedGraph):
            raise GraphError(f"{share!r} is no graph of this driver", "pass what end_capture returned")
        self._graphs.releases.poll()
        return self._graphs.begin(stream, share, mode)

    def end_capture(self, stream: int) -> CapturedGraph:
        return self._graphs.end(stream)

    def abort_capture(self, stream: int) -> None:
        self._graphs.abort(stream)

    def on_graph_release(self, graph: Graph, callback: Callable[[], None]) -> None:
        """Call back once when graph, executable and launches in flight are gone.

        The callback runs in the thread that polls: in `poll`, `alloc`, `trim`, `synchronize` or
        `begin_capture`.
        """
        if not isinstance(graph, CapturedGraph):
            raise GraphError(f"{graph!r} is no graph of this driver", "pass what end_capture or a watcher was given")
        if graph.release.poll():
            callback()
        else:
            graph.release.callbacks.append(callback)

    def poll(self) -> None:
        """Run the callbacks of graphs that have gone since the last poll. Calls no device."""
        self._graphs.releases.poll()

    def settle(self) -> None:
        """Block the host until graphs that were reset or collected are gone, then `poll`.

        CUDA says so from a thread of its own, some time after their last launch has ended.
        """
        self._graphs.destroy_postponed()
        if self._graphs.releases.ending:
            self.synchronize()
            self._graphs.releases.settle()

    def watch_captures(
        self,
        beginning: Callable[[int], None],
        began: Callable[[int, int], None],
        ended: Callable[[int, int, CapturedGraph | None], None],
    ) -> None:
        self._graphs.watch(beginning, began, ended)


def _device_index(device: torch.device | str | int) -> int:
    if torch.version.hip is not None:
        raise Unsupported("ROCm is not supported", "use an NVIDIA device, or device='cpu'")
    wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if wanted.type != "cuda":
        raise DeviceError(f"{wanted} is no CUDA device", "pass 'cuda', 'cuda:0' or an index")
    if not torch.backends.cuda.is_built():
        raise Unsupported(
            f"this build of PyTorch ({torch.__version__}) has no CUDA",
            "install a CUDA build, or use device='cpu'",
        )
    count = torch.cuda.device_count()
    index = wanted.index if wanted.index is not None else torch.cuda.current_device() if count else 0
    if not 0 <= index < count:
        raise DeviceError(f"there is no {wanted}: {count} CUDA devices are visible", "check CUDA_VISIBLE_DEVICES")
    return index


def _primary_context(lib: LibCuda, index: int) -> int:
    """The context torch uses on a device; retained for good, since streams outlive any driver object."""
    handle, context = c_int(), c_void_p()
    lib.check(lib.cuDeviceGet(byref(handle), index), "cuDeviceGet", index=index)
    lib.check(lib.cuDevicePrimaryCtxRetain(byref(context), handle.value), "cuDevicePrimaryCtxRetain", index=index)
    return context.value or 0


_drivers: dict[int, CudaDriver] = {}
_lock = threading.Lock()


def cuda_driver(device: torch.device | str | int = "cuda") -> CudaDriver:
    """The process's one driver of a device; raises what `CudaDriver` raises."""
    index = _device_index(device)
    with _lock:
        if index not in _drivers:
            _drivers[index] = CudaDriver(index)
        return _drivers[index]
