"""The bench on a GPU: real bytes at true sizes, delays that keep streams busy, nothing that tells races."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

from workspace.config import WorkspaceConfig
from workspace.create import create
from workspace.cuda import CudaDriver
from workspace.cuda.memory import DeviceBuffer
from workspace.streams import CURRENT, Stream
from workspace.testing.bench import Bench, Captured, Copy
from workspace.testing.failure import ContractBroken
from workspace.testing.simulated import extent
from workspace.workspace import Workspace

DELAY, LONGER, LENGTHS = 40_000_000, 10_000_000, 5
"""Cycles of the shortest delay, 20 ms at 2 GHz: longer than the host needs to enqueue what must wait for it. The next
ones are longer, so that streams delayed one after the other do not wake at once."""

CHUNK = 256 << 20
"""Bytes that are taken from the device at a time for copies."""

MOMENTS = 2.0
"""Seconds for a graph that is destroyed to be gone, and for a destroyed stream's handle to come up again."""

ASYNC_SEGMENT = 32 << 20
"""What the pool of cudaMallocAsync takes from the device at a time."""

DEVICE_ORDINAL = 9

VERBS = {
    "record": "record", "wait": "wait", "record_use": "record_stream", "done": "query", "synchronize": "synchronize",
    "synchronize_event": "synchronize", "alloc": "alloc", "empty": "malloc", "memset": "memset",
}  # fmt: skip
"""Verbs of the driver, and the names scenarios count them by."""

_spare_streams: dict[int, list[int]] = {}
"""By device: streams of benches that are over. A stream is never destroyed, and thousands of them would be."""


class CountedDriver(CudaDriver):
    """A driver of one bench: counts its verbs, and takes the streams of earlier benches, which are idle.

    Parameters
    ----------
    mapped
        Keep freed memory mapped: with a guard removed, what writes it must corrupt, not end the process.
    """

    def __init__(self, index: int, mapped: bool) -> None:
        super().__init__(index)
        self.counted: Counter[str] = Counter()
        self.mapped = mapped
        self.drawn: list[int] = []
        for verb, name in VERBS.items():
            setattr(self, verb, self._counting(getattr(self, verb), name))

    def _counting(self, verb: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.counted[name] += 1
            return verb(*arguments, **options)

        return counted

    def new_stream(self, name: str) -> int:
        spare = _spare_streams.setdefault(self._index, [])
        key = spare.pop() if spare else super().new_stream(name)
        self._streams._keep(key, key)
        self.drawn.append(key)
        return key

    def trim(self) -> None:
        if self.mapped:
            self.poll()
        else:
            super().trim()


class DeviceMemory:
    """Bytes for copies, and how they are made: by libcuda, so that the framework's allocator sees nothing of it."""

    def __init__(self, driver: CudaDriver) -> None:
        lib = self._lib = driver._lib
        self._context = driver._events._context
        self._copy = lib._function("cuMemcpyDtoDAsync_v2", [c_uint64, c_uint64, c_size_t, c_void_p])
        self._read = lib._function("cuMemcpyDtoH_v2", [c_void_p, c_uint64, c_size_t])
        self._attribute = lib._function("cuPointerGetAttribute", [c_void_p, c_uint, c_uint64])
        self._allocate = lib._function("cuMemAlloc_v2", [c_void_p, c_size_t])
        self._lock = threading.Lock()
        self._chunks: list[tuple[int, int]] = []
        self._chunk, self._taken = 0, 0
        self._host = torch.empty(1 << 20, dtype=torch.uint8)

    def clear(self) -> None:
        """All places are free again; what was taken from the device stays."""
        self._chunk, self._taken = 0, 0

    def copied(self, address: int, nbytes: int, handle: int) -> int:
        """Enqueue a copy to a place of its own; its address."""
        with self._lock, self._lib.current(self._context):
            place = self._place(-(-nbytes // 256) * 256)
            self._lib.check(self._copy(place, address, nbytes, handle), "cuMemcpyDtoDAsync", nbytes=nbytes)
        return place

    def _place(self, nbytes: int) -> int:
        while self._chunk < len(self._chunks):
            first, size = self._chunks[self._chunk]
            if self._taken + nbytes <= size:
                self._taken += nbytes
                return first + self._taken - nbytes
            self._chunk, self._taken = self._chunk + 1, 0
        made, size = c_uint64(), max(nbytes, CHUNK)
        with self._lib.relaxed():
            self._lib.check(self._allocate(byref(made), size), "cuMemAlloc", nbytes=size)
        self._chunks.append((made.value, size))
        self._taken = nbytes
        return made.value

    def differing(self, address: int, nbytes: int, value: int) -> int:
        """How many bytes are not `value`."""
        if self._host.numel() < nbytes:
            self._host = torch.empty(nbytes, dtype=torch.uint8)
        host = self._host[:nbytes]
        with self._lib.current(self._context), self._lib.relaxed():
            self._lib.check(self._read(host.data_ptr(), address, nbytes), "cuMemcpyDtoH", nbytes=nbytes)
        return int((host != value).sum())

    def device_of(self, address: int) -> int:
        """Index of the device an address belongs to, -1 for none."""
        found = c_int(-1)
        with self._lib.current(self._context):
            code = self._attribute(byref(found), DEVICE_ORDINAL, address)
        return -1 if code else found.value


@cache
def device_memory(index: int) -> DeviceMemory:
    """Of one device, for the whole process."""
    return DeviceMemory(CudaDriver(index))


class DeviceCopy(Copy):
    """A copy in device memory of its own."""

    def __init__(self, label: str, memory: DeviceMemory, nbytes: int) -> None:
        super().__init__(label)
        self.memory, self.nbytes, self.address = memory, nbytes, 0

    def wrong(self, value: int) -> int:
        return self.memory.differing(self.address, self.nbytes, value) if self.nbytes else 0


class Replayable(Captured):
    """A ``torch.cuda.CUDAGraph`` that the library was not asked about."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self.graph.reset()


class Work:
    """An asynchronous collective: kernels on a stream of its own, which `wait` makes the current stream wait for."""

    def __init__(self, bench: CudaBench, stream: int) -> None:
        self._bench = bench
        self._stream = stream

    def wait(self) -> None:
        self._bench.order(self._stream, CURRENT)


class CudaBench(Bench):
    """A bench on a GPU: nothing is judged, so that what goes wrong shows as wrong bytes or not at all.

    Counts are scaled down, sizes are true.

    Parameters
    ----------
    control
        Whether a guard is removed.
    index
        Of the device.
    stretch
        How many times as long delays are.
    """

    def __init__(self, strategy: str, control: bool = False, index: int = 0, stretch: int = 1) -> None:
        super().__init__(strategy, real=True, judged=False, full=False)
        self._control, self._index, self._stretch = control, index, stretch
        if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
            self.segment = ASYNC_SEGMENT
        with torch.cuda.device(index):
            torch.cuda._sleep(1)  # loaded now: a capture could not
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
        self.memory = device_memory(index)
        self.memory.clear()
        self.driver = CountedDriver(index, mapped=control)
        self._reserved_before = torch.cuda.memory_reserved(index)
        self._copies, self._delays = 0, 0
        self._captured: list[Replayable] = []
        self._raw: set[int] = set()
        self._gone: set[int] = set()

    def workspace(self, strategy: str | None = None, **settings: Any) -> Workspace:
        chosen: dict[str, Any] = {"strategy": strategy or self.strategy} | settings
        # The config itself, so that no file or variable of the machine has a say.
        return create(config=WorkspaceConfig(**chosen), device=self.driver)

    def raw_stream(self) -> int:
        """One whose handle was a destroyed stream's, if there is any."""
        until = time.monotonic() + MOMENTS
        while True:
            made = c_void_p()
            with self.driver._lib.current(self.driver._events._context):
                self.driver._lib.check(self.driver._lib.cuStreamCreate(byref(made), 1), "cuStreamCreate")
            handle = made.value or 0
            self._raw.add(handle)
            if not self._gone or handle in self._gone or time.monotonic() > until:
                break
            time.sleep(0.001)
        self._gone.discard(handle)
        return handle

    def destroy(self, raw: Any) -> None:
        self.driver._lib.check(self.driver._lib.cuStreamDestroy_v2(raw), "cuStreamDestroy")
        self._raw.discard(raw)
        self._gone.add(raw)

    # -- work ------------------------------------------------------------------------------------------------
    def fill(self, tensor: Any, value: int, stream: Any = CURRENT) -> None:
        address, nbytes = extent(tensor)
        self._fill(address, nbytes, value, self._key(stream))

    def _fill(self, address: int, nbytes: int, value: int, key: int) -> None:
        if nbytes:
            self.driver._events.memset(address, nbytes, value, key)

    def copy(self, tensor: Any, stream: Any = CURRENT) -> DeviceCopy:
        address, nbytes = extent(tensor)
        self._copies += 1
        made = DeviceCopy(f"copy {self._copies}", self.memory, nbytes)
        if nbytes:
            handle = self.driver._streams.live_handle(self._key(stream))
            made.address = self.memory.copied(address, nbytes, handle)
        return made

    def slow(self, stream: Any = CURRENT) -> None:
        cycles = self._stretch * (DELAY + LONGER * (self._delays % LENGTHS))
        self._delays += 1
        with self.driver._graphs.on(self._key(stream)):
            torch.cuda._sleep(cycles)

    def settle(self) -> None:
        torch.cuda.synchronize(self._index)

    def soon(self, condition: Callable[[], bool]) -> bool:
        until = time.monotonic() + MOMENTS
        while not condition() and time.monotonic() < until:
            time.sleep(0.001)
            self.driver.poll()
        return condition()

    def _key(self, stream: Any) -> int:
        if stream is CURRENT:
            return self.driver.current_stream()
        return stream.key if isinstance(stream, Stream) else self.driver.stream_key(stream)

    # -- order -----------------------------------------------------------------------------------------------
    def order(self, before: Any, after: Any) -> None:
        events = self.driver._events
        event = events.new()
        events.record(event, self._key(before))
        events.wait(event, self._key(after))

    def record_stream(self, tensor: Any, stream: Stream) -> None:
        self.tensor(tensor).record_stream(self.driver._streams.torch_stream(stream.key))

    def collective(self, tensor: Any, value: int) -> Work:
        stream = self.driver.new_stream("collective")
        self.order(CURRENT, stream)
        self.slow(stream)
        self._fill(*extent(tensor), value, stream)
        return Work(self, stream)

    @contextmanager
    def foreign_capture(self, stream: Stream) -> Iterator[Replayable]:
        captured = Replayable()
        self._captured.append(captured)  # a graph that is only captured is nobody else's
        with self.driver._graphs.on(stream.key):
            captured.graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield captured
            except BaseException:
                with suppress(RuntimeError):  # the body's own error is the one to be told
                    captured.graph.capture_end()
                captured.graph.reset()
                raise
            captured.graph.capture_end()

    # -- memory ----------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.driver.device)

    def empty_cache(self) -> None:
        if not self._control:
            torch.cuda.empty_cache()

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._index) - self._reserved_before

    def fill_at(self, address: int, nbytes: int, value: int) -> None:
        self._fill(address, nbytes, value, self._key(CURRENT))

    def owns(self, address: int) -> bool:
        return self.memory.device_of(address) == self._index

    def past(self, whole: DeviceBuffer, nbytes: int) -> DeviceBuffer:
        return DeviceBuffer(whole._bytes[nbytes:])

    @contextmanager
    def device_capacity(self, nbytes: int) -> Iterator[None]:
        total = torch.cuda.get_device_properties(self._index).total_memory
        torch.cuda.set_per_process_memory_fraction((nbytes + self._reserved_before) / total, self._index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self._index)

    def another(self) -> CudaBench:
        second = CudaBench(self.strategy, self._control, self._index + 1, self._stretch)
        self.cleanup(second.close)
        return second

    # -- seeing ----------------------------------------------------------------------------------------------
    def calls(self) -> Counter[str]:
        return Counter(self.driver.counted)

    def detect(self, first: str, second: str) -> None:
        raise ContractBroken(f"a GPU keeps no access log: nobody tells whether {first!r} and {second!r} race")

    def verdict(self) -> str:
        return "UNKNOWN"

    def objection(self) -> str:
        return ""

    def close(self) -> None:
        super().close()
        self.settle()
        for raw in self._raw:
            self.driver._lib.cuStreamDestroy_v2(raw)
        self._raw.clear()
        self._captured.clear()
        self._workspace = None
        _spare_streams.setdefault(self._index, []).extend(self.driver.drawn)
        self.driver.drawn = []
