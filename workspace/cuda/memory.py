"""Bytes from torch's caching allocator, and tensors that own a range of them."""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from workspace.cuda.libcuda import LibCuda, failure
from workspace.cuda.streams import Streams
from workspace.driver import Buffer
from workspace.errors import CaptureBroken, CaptureError, DeviceError, DriverError, OutOfMemory, SizeError

_construct = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)
"""What torch's own CUDA graph trees make their outputs with: a third of the host time of `Tensor.set_`."""


class DeviceBuffer:
    """Bytes of one device; dropping the last reference gives them back to torch's allocator.

    Attributes
    ----------
    address
        First byte, aligned to at least 256 bytes (0 for an empty buffer).
    nbytes
        Size in bytes.
    """

    __slots__ = ("__weakref__", "_bytes", "address", "nbytes")

    def __init__(self, held: torch.Tensor) -> None:
        self._bytes = held
        self.address = held.data_ptr()
        self.nbytes = held.nbytes

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self._bytes.record_stream(stream)


class _Place:
    """Device bytes that are somebody else's, who keeps them alive."""

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes


class _Death(weakref.ref):
    """Reference to a storage that keeps its buffer alive and knows whom to tell when the storage dies.

    A `weakref.finalize` would do, at twice the host time and with a call at exit that nobody wants.
    """

    __slots__ = ("buffer", "on_death")
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    buffer: Buffer
    on_death: Callable[[], None] | None


_living: set[_Death] = set()


def _died(death: Any) -> None:
    _living.discard(death)
    if death.on_death is not None:
        death.on_death()


class Memory:
    """Allocation and tensors on one device."""

    def __init__(self, lib: LibCuda, streams: Streams, device: torch.device) -> None:
        self._lib = lib
        self._streams = streams
        self._device = device
        self._construct = _construct if device.type == "cuda" else None

    def alloc(self, nbytes: int) -> DeviceBuffer:
        """Bytes for the calling thread's current stream of this device.

        An ordinary tensor, not a MemPool: a pool's idle bytes are lost to the rest of the process, and
        ``cudaMallocAsync`` has no pools.
        """
        if not isinstance(nbytes, int) or not 0 <= nbytes < 1 << 63:
            raise SizeError(f"{nbytes!r} bytes cannot be allocated", "ask for a size between 0 and 2**63 - 1")
        with torch.inference_mode(False):
            return DeviceBuffer(self.empty((nbytes,), torch.uint8, relaxed=True))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, relaxed: bool) -> torch.Tensor:
        """``torch.empty`` on the calling thread's current stream of this device, with typed errors.

        Without `relaxed`, new device memory would break a "global" capture of another thread.
        """
        try:
            if relaxed:
                with self._lib.relaxed():
                    return torch.empty(shape, dtype=dtype, device=self._device)
            return torch.empty(shape, dtype=dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            raise self.out_of_memory(math.prod(shape) * dtype.itemsize, error) from error
        except RuntimeError as error:
            raise torch_failure(error, "torch.empty", shape=shape, dtype=dtype, device=self._device) from error

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> bytes:
        """Copy bytes to the host, on the current stream, which must not be capturing."""
        tensor = self.tensor(buffer, offset, (nbytes,), torch.uint8, None)
        try:
            with self._lib.relaxed():
                copied = tensor.cpu()
        except RuntimeError as error:
            raise torch_failure(error, "Tensor.cpu", nbytes=nbytes) from error
        return ctypes.string_at(copied.data_ptr(), nbytes) if nbytes else b""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of page-locked host memory, which torch reuses only when the copies it knows of are over."""
        try:
            with torch.inference_mode(False), self._lib.relaxed():
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise torch_failure(error, "torch.empty", nbytes=nbytes, pin_memory=True) from error

    def upload(self, host: torch.Tensor, offset: int, address: int, nbytes: int) -> None:
        """Copy pinned bytes to the device, on the calling thread's current stream, while the host goes on."""
        place = self.tensor(_Place(address, nbytes), 0, (nbytes,), torch.uint8, None)
        try:
            with torch.no_grad():
                place.copy_(host[offset : offset + nbytes], non_blocking=True)
        except RuntimeError as error:
            raise torch_failure(error, "Tensor.copy_", address=hex(address), nbytes=nbytes) from error

    def out_of_memory(self, nbytes: int, error: Exception | None = None) -> OutOfMemory:
        free = total = -1
        try:
            with self._lib.relaxed():
                free, total = torch.cuda.mem_get_info(self._device)
        except RuntimeError as unknown:  # the figures are a courtesy: the refusal stands without them
            if error is not None:
                error.add_note(f"free memory is unknown: {unknown}")
        return OutOfMemory(
            f"{nbytes} bytes asked of {self._device}, {free} of {total} bytes free on it",
            "reserve less, set a capacity, release what other owners hold, or retry with ws.retry_on_oom",
            asked=nbytes,
            free=free,
            total=total,
        )

    def tensor(
        self,
        buffer: Buffer,
        offset: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        on_death: Callable[[], None] | None,
    ) -> torch.Tensor:
        """A contiguous tensor whose storage is exactly its bytes of the buffer; see `Driver.tensor`."""
        elements, strides = contiguous(shape)
        nbytes = elements * dtype.itemsize
        if offset < 0 or offset + nbytes > buffer.nbytes or (buffer.address + offset) % dtype.itemsize:
            raise SizeError(
                f"a {dtype} tensor {shape} at byte {offset} does not fit a buffer of {buffer.nbytes} bytes",
                "keep it inside the buffer and aligned to its element size",
                offset=offset,
                nbytes=nbytes,
                capacity=buffer.nbytes,
            )
        storage = torch._C._construct_storage_from_data_pointer(buffer.address + offset, self._device, nbytes)
        death = _Death(storage, _died)
        death.buffer, death.on_death = buffer, on_death
        _living.add(death)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # an inference tensor could not be saved or versioned later
                return self._over(storage, shape, strides, dtype)
        return self._over(storage, shape, strides, dtype)

    def _over(self, storage: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._construct is None:
            empty = torch.empty(0, dtype=dtype, device=self._device)
            return empty.set_(storage, 0, shape, strides)
        described = {
            "size": shape,
            "stride": strides,
            "storage_offset": 0,
            "dtype": dtype,
            "device": self._device,
        }
        made: torch.Tensor = self._construct(described, storage)
        return made

    def record_use(self, memory: Any, stream: int) -> bool:
        if isinstance(memory, torch.Tensor) and memory.device != self._device:
            raise DeviceError(
                f"a tensor on {memory.device} was declared used on a stream of {self._device}",
                "move the tensor, or use the workspace of its device",
            )
        memory.record_stream(self._streams.torch_stream(stream))
        return True

    def trim(self, capturing: bool) -> None:
        """``empty_cache``. ``cudaMallocAsync`` synchronises the device for it, which breaks a capture in progress."""
        if capturing and torch.cuda.get_allocator_backend() == "cudaMallocAsync":
            raise CaptureError(
                "cudaMallocAsync cannot return cached memory while a capture is open",
                "trim before it begins or after it has ended, or use torch's native allocator",
            )
        try:
            with self._lib.relaxed():
                torch.cuda.empty_cache()
        except RuntimeError as error:
            raise torch_failure(error, "torch.cuda.empty_cache") from error


@functools.lru_cache(maxsize=4096)
def contiguous(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Element count and strides of a contiguous tensor; in strides size 0 counts as 1, as in torch."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return math.prod(shape), tuple(reversed(strides))


def torch_failure(error: RuntimeError, verb: str, **values: object) -> DriverError | CaptureBroken:
    """The typed error for a failure that came through torch; device errors carry libcuda's code."""
    code = getattr(error, "error_code", 0) or 0
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    if code:
        return failure(first_line, code, verb, **values)
    arguments = ", ".join(f"{name}={value}" for name, value in values.items())
    return DriverError(
        f"{verb}({arguments}) failed: {first_line}",
        "see the error above",
        verb=verb,
        code=0,
        sticky=False,
        **values,
    )
