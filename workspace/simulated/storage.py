"""Memory of the device: the caching allocator's verbs, raw segments and tensors over both."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from workspace.errors import DeviceError, OutOfMemory, Unsupported
from workspace.simulated.allocator import CachingAllocator
from workspace.simulated.blocks import Block
from workspace.simulated.buffer import Buffer
from workspace.simulated.events import Stamp
from workspace.simulated.mapping import Mapping
from workspace.simulated.memory import Kind, Memory
from workspace.simulated.ordering import Ordering
from workspace.simulated.statistics import Statistics


class Storage(Ordering):
    """The device's memory."""

    def __init__(self, memory: Kind, capacity: int | None, *engine: Any) -> None:
        super().__init__(*engine)
        self.memory = Memory(memory, capacity)
        self.allocator = CachingAllocator(self)
        self._gone: deque[int] = deque()

    def alloc(self, nbytes: int, stream: int | None = None) -> Buffer:
        """Bytes from the caching allocator for a stream; in a capture, from its private pool."""
        with self.lock:
            self.counters["alloc"] += 1
            state = self.state(stream)
            private = None
            if state.capture is not None:
                private = self.captures.valid(state.capture, state.key).private
            block = self.allocator.alloc(nbytes, state.key, private) if nbytes else None
            return Buffer(nbytes, state.key, block, self._give_back)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int | None = None) -> Any:
        """A tensor with a block of its own (``torch.empty``); the block is free when the last view dies."""
        count = dtype.itemsize
        for length in shape:
            count *= length
        buffer = self.alloc(count, stream)
        if buffer.block is not None:
            buffer.block.tensor = True
        return self.memory.tensor(buffer.address, shape, dtype, buffer)

    def tensor(
        self,
        buffer: Any,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        on_death: Callable[[], None] | None = None,
    ) -> Any:
        """A contiguous tensor with a storage of its own over ``buffer[offset:]``, which it keeps alive."""
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        if offset < 0 or offset + nbytes > buffer.nbytes:
            raise DeviceError(
                f"[{offset}, {offset + nbytes}) does not fit the buffer's {buffer.nbytes} bytes",
                "allocate a larger buffer or take a smaller tensor",
                offset=offset,
                nbytes=nbytes,
                capacity=buffer.nbytes,
            )
        return self.memory.tensor(buffer.address + offset, shape, dtype, buffer, on_death)

    def read(self, buffer: Any, offset: int, nbytes: int) -> bytes:
        """Bytes of a buffer, copied to the host after the device has gone idle."""
        with self.lock:
            if self.memory.kind == "virtual":
                raise Unsupported("virtual memory has no bytes to read", "use a device with memory='host'")
            self.synchronize()
            return ctypes.string_at(buffer.address + offset, nbytes)

    def record_stream(self, memory: Any, stream: int) -> bool:
        """Tell the caching allocator of a use on another stream; False for memory it did not hand out itself.

        Tensors made by `empty` and buffers are its own; for a tensor over a buffer (a lease) nothing happens.
        """
        with self.lock:
            self.counters["record_stream"] += 1
            key = self.streams[stream].key
            if isinstance(memory, Buffer):
                block = memory.block
            else:
                whole = memory.untyped_storage().data_ptr()
                block = self.allocator.at(whole)
                block = block if block is not None and block.tensor else None
            if block is not None:
                self.allocator.record_stream(block, key)
            return block is not None

    def empty_cache(self) -> None:
        """Return cached segments to the device."""
        with self.lock:
            self.counters["empty_cache"] += 1
            self.reclaim()
            self.allocator.empty_cache()

    def malloc(self, nbytes: int) -> int:
        """Address of a segment straight from the device (``cudaMalloc``); breaks captures as CUDA does."""
        with self.lock:
            self.captures.refuse_unsafe("malloc")
            return self.cuda_malloc(nbytes)

    def free(self, address: int) -> None:
        """Give a segment back (``cudaFree``)."""
        with self.lock:
            self.captures.refuse_unsafe("free")
            self.cuda_free(address)

    def map(self, nbytes: int) -> Mapping:
        """A segment of the device whose memory can be given back and taken anew at the same addresses."""
        with self.lock:
            self.counters["map"] += 1
            self.reclaim()
            return Mapping(self, self._or_without_cache(lambda: self.cuda_malloc(nbytes)), nbytes, self._gone.append)

    def unmap(self, address: int) -> None:
        """Give back the memory of a mapping; the device finishes its work first, and the bytes' history ends."""
        with self.lock:
            self.counters["unmap"] += 1
            self.queue.drain()
            nbytes = self.memory.unmap(address)
            if self.judge is not None:
                self.judge.forget(address, nbytes)

    def remap(self, address: int) -> None:
        """Put memory behind the addresses of a mapping again. Raises `OutOfMemory`."""
        with self.lock:
            self.counters["remap"] += 1
            self._or_without_cache(lambda: self.memory.remap(address))

    def reclaim(self) -> None:
        """Give back the mappings whose last reference has died."""
        with self.lock:
            while self._gone:
                self.cuda_free(self._gone.popleft())

    def _or_without_cache(self, take: Callable[[], Any]) -> Any:
        try:
            return take()
        except OutOfMemory:
            self.allocator.empty_cache()
        return take()

    @property
    def statistics(self) -> Statistics:
        """Allocated, reserved and peak bytes of the caching allocator."""
        with self.lock:
            self.allocator.bury()
            return self.allocator.statistics

    def cuda_malloc(self, nbytes: int) -> int:
        """As `malloc`, for the allocator, which calls it in relaxed mode."""
        self.counters["malloc"] += 1
        return self.memory.malloc(nbytes)

    def cuda_free(self, address: int) -> None:
        """As `free`; the device finishes its work first, and the bytes' history ends."""
        self.counters["free"] += 1
        self.queue.drain()
        nbytes = self.memory.free(address)
        if self.judge is not None:
            self.judge.forget(address, nbytes)

    def settle(self, address: int, nbytes: int, stamp: Stamp) -> None:
        """The allocator saw the stamp complete and hands the bytes out again."""
        if self.judge is not None:
            self.judge.settle(address, nbytes, stamp)

    def _give_back(self, block: Block) -> None:
        """Free a block from a finaliser, now if nothing is going on and else before the next allocation."""
        if self.lock._is_owned() or not self.lock.acquire(blocking=False):  # type: ignore[attr-defined]
            self.allocator.dying.append(block)
            return
        try:
            self.allocator.bury()
            self.allocator.free(block)
        finally:
            self.lock.release()
