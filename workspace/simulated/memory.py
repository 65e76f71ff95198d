"""Device memory: segments of real bytes, or of addresses only."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch

from workspace.errors import DeviceError, OutOfMemory
from workspace.simulated.virtual import VirtualTensor

Kind = Literal["host", "virtual"]
VIRTUAL_BASE = 1 << 44
VIRTUAL_ALIGNMENT = 2 << 20
LOST = 0xDD
"""What bytes hold whose memory was given back and taken anew."""

CPU = torch.device("cpu")


class Memory:
    """What ``cudaMalloc`` hands out.

    Host segments are anonymous mappings, committed page by page and returned to the system when freed, once
    no queued operation holds them. Virtual addresses are never handed out twice.

    Parameters
    ----------
    kind
        ``host`` for real bytes, ``virtual`` for addresses.
    capacity
        Bytes the device has; None for no bound.
    """

    def __init__(self, kind: Kind, capacity: int | None = None) -> None:
        self.kind = kind
        self.capacity = capacity
        self.used = 0
        self._sizes: dict[int, int] = {}
        self._unmapped: set[int] = set()
        self._arenas: dict[int, torch.Tensor] = {}
        self._bases: list[int] = []
        self._next = VIRTUAL_BASE

    def malloc(self, nbytes: int) -> int:
        """Address of a new segment. Raises `OutOfMemory`."""
        self._room_for(nbytes)
        if self.kind == "virtual":
            address = self._next
            self._next += -(-nbytes // VIRTUAL_ALIGNMENT) * VIRTUAL_ALIGNMENT
        else:
            arena = host_bytes(nbytes)
            address = arena.data_ptr()
            self._arenas[address] = arena
        self._sizes[address] = nbytes
        self._bases.insert(bisect_right(self._bases, address), address)
        self.used += nbytes
        return address

    def _room_for(self, nbytes: int) -> None:
        if self.capacity is not None and self.used + nbytes > self.capacity:
            raise OutOfMemory(
                f"{nbytes} bytes were asked for, {self.capacity - self.used} of {self.capacity} are left",
                "trim cached memory, lower the load, or give the simulated device more capacity",
                asked=nbytes,
                left=self.capacity - self.used,
            )

    def free(self, address: int) -> int:
        """Give a segment back; return its size."""
        nbytes = self._sizes.pop(address, None)
        if nbytes is None:
            raise DeviceError(f"{address:#x} is not the address of a segment", "free what malloc returned, once")
        self._arenas.pop(address, None)
        if address in self._unmapped:
            self._unmapped.discard(address)
        else:
            self._bases.remove(address)
            self.used -= nbytes
        return nbytes

    def unmap(self, address: int) -> int:
        """Give back the memory of a segment, and keep its addresses; return its size."""
        self._bases.remove(address)
        self._unmapped.add(address)
        self.used -= self._sizes[address]
        return self._sizes[address]

    def remap(self, address: int) -> None:
        """Put memory behind a segment's addresses again, which holds other bytes than before. Raises `OutOfMemory`."""
        nbytes = self._sizes[address]
        self._room_for(nbytes)
        self._unmapped.remove(address)
        self._bases.insert(bisect_right(self._bases, address), address)
        self.used += nbytes
        if self.kind == "host":
            ctypes.memset(address, LOST, nbytes)

    def segment_of(self, address: int, nbytes: int = 1) -> int | None:
        """Base of the live segment that holds ``[address, address + nbytes)``, None if no segment does."""
        index = bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        base = self._bases[index]
        return base if address + nbytes <= base + self._sizes[base] else None

    def segment(self, base: int) -> torch.Tensor:
        """A host segment's bytes, uint8; they stay mapped as long as the tensor or a view of it lives."""
        return self._arenas[base]

    def tensor(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        keep: Any = None,
        on_death: Callable[[], None] | None = None,
    ) -> Any:
        """A contiguous tensor with its own storage; `keep` and `on_death` last until its last view dies."""
        count = 1
        for length in shape:
            count *= length
        nbytes = count * dtype.itemsize
        if self.kind == "virtual":
            virtual = VirtualTensor(address, nbytes, shape, dtype, keep)
            if on_death is not None:
                weakref.finalize(virtual, on_death).atexit = False
            return virtual
        with torch.inference_mode(False):
            if not nbytes:
                tensor = torch.empty(shape, dtype=dtype)
            else:
                bytes_ = torch._C._construct_storage_from_data_pointer(address, CPU, nbytes)
                tensor = torch.empty(0, dtype=dtype).set_(bytes_, 0, shape)  # type: ignore[call-overload]
        if keep is not None or on_death is not None:
            weakref.finalize(tensor.untyped_storage(), _dead, keep, on_death).atexit = False
        return tensor

    def fill(self, address: int, nbytes: int, value: int) -> Callable[[], None] | None:
        """A function that fills bytes of a segment, keeping the segment alive; None for virtual memory."""
        segment = self._alive(address, nbytes)
        return None if segment is None else partial(_fill, segment, address, nbytes, value)

    def move(self, host: torch.Tensor, offset: int, address: int, nbytes: int) -> Callable[[], None] | None:
        """A function that copies bytes of host memory to a segment; None for virtual memory."""
        segment = self._alive(address, nbytes)
        return None if segment is None else partial(_move, segment, address, host, offset, nbytes)

    def _alive(self, address: int, nbytes: int) -> torch.Tensor | None:
        """The host segment that holds some bytes; None for virtual memory."""
        base = self.segment_of(address, nbytes)
        if base is None:
            raise DeviceError(
                f"[{address:#x}, +{nbytes}) lies in no live segment of the device",
                "write bytes that the device allocated and has not freed",
                address=address,
                nbytes=nbytes,
            )
        return None if self.kind == "virtual" else self._arenas[base]


def _fill(segment: torch.Tensor, address: int, nbytes: int, value: int) -> None:
    """`segment` is held so that its bytes stay mapped until this has run, even if it was freed meanwhile."""
    ctypes.memset(address, value, nbytes)


def _move(segment: torch.Tensor, address: int, host: torch.Tensor, offset: int, nbytes: int) -> None:
    """`segment` as in `_fill`; the host's bytes are those of the moment this runs."""
    ctypes.memmove(address, host.data_ptr() + offset, nbytes)


def host_bytes(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of the host, at least one."""
    return torch.frombuffer(_map(nbytes), dtype=torch.uint8)


def _dead(keep: Any, on_death: Callable[[], None] | None) -> None:
    if on_death is not None:
        on_death()
    del keep


def _map(nbytes: int) -> mmap.mmap:
    """Anonymous memory of the host; it fails where the host has no room, as ``cudaMalloc`` fails."""
    try:
        return mmap.mmap(-1, nbytes)
    except (OSError, OverflowError, ValueError) as error:
        raise OutOfMemory(
            f"the host has no {nbytes} bytes to stand for device memory: {error}",
            "ask for less, or use memory='virtual', which holds addresses only",
            asked=nbytes,
        ) from error
