"""Bytes straight from the device, whose addresses stay reserved while there is no memory behind them.

CUDA's virtual memory management (CUDA driver API, section "Virtual Memory Management"): an address range is reserved
once, and memory is created, mapped to it and unmapped from it any number of times. What a graph was captured with keeps
its meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_ubyte, c_uint64, c_ulonglong, c_ushort, c_void_p
from typing import Any

from workspace.cuda.libcuda import LibCuda
from workspace.errors import Unsupported

PINNED, DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, and
CU_MEM_ALLOC_GRANULARITY_MINIMUM of cuda.h."""

SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""

OUT_OF_MEMORY = 2


class _Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int), ("handles", c_int), ("location", _Location), ("win32", c_void_p), ("compression", c_ubyte),
        ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4),
    )  # fmt: skip


class _Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: dict[str, list[Any]] = {
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(_Properties), c_int],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemCreate": [POINTER(c_ulonglong), c_size_t, POINTER(_Properties), c_ulonglong],
    "cuMemRelease": [c_ulonglong],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_ulonglong, c_ulonglong],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(_Access), c_size_t],
    "cuMemUnmap": [c_uint64, c_size_t],
}


class Mapping:
    """One range of addresses; see `workspace.driver.Mapping`.

    Attributes
    ----------
    address
        First byte, aligned to the device's granule (2 MiB).
    nbytes
        Bytes asked for; the memory behind them is a multiple of the granule.
    mapped
        Whether there is memory behind the addresses.
    """

    __slots__ = ("__weakref__", "_mappings", "_size", "address", "mapped", "nbytes")

    def __init__(self, mappings: Mappings, address: int, size: int, nbytes: int) -> None:
        self._mappings = mappings
        self._size = size
        self.address = address
        self.nbytes = nbytes
        self.mapped = False

    def unmap(self) -> None:
        """Give the memory back. The device must be idle."""
        if self.mapped:
            self._mappings.unmap(self.address, self._size)
            self.mapped = False

    def remap(self) -> None:
        """Put memory behind the addresses again. Raises `OutOfMemory`."""
        if not self.mapped:
            self._mappings.back(self.address, self._size)
            self.mapped = True

    def __del__(self) -> None:
        # A finaliser: it takes no lock and calls no CUDA.
        self._mappings.gone.append((self.address, self._size, self.mapped))


_gone: dict[int, deque[tuple[int, int, bool]]] = {}
"""By device: what any driver of it left behind."""


class Mappings:
    """The mappings of one device.

    Parameters
    ----------
    idle
        Blocks the host until the device is idle.
    trim
        Lets the framework's allocator return to the device what it caches.
    refused
        Makes the error for so many bytes that the device has not got.

    Attributes
    ----------
    gone
        Address, size and whether there is memory, of those whose last reference has died.
    """

    def __init__(
        self,
        lib: LibCuda,
        index: int,
        context: int,
        idle: Callable[[], None],
        trim: Callable[[], None],
        refused: Callable[[int], Exception],
    ) -> None:
        self._lib = lib
        self._context = context
        self._idle = idle
        self._trim = trim
        self._refused = refused
        self.gone = _gone.setdefault(index, deque())
        self._calls = {name: lib._function(name, arguments) for name, arguments in _SIGNATURES.items()}
        device, supported = c_int(), c_int()
        lib.check(lib.cuDeviceGet(byref(device), index), "cuDeviceGet", index=index)
        self._call("cuDeviceGetAttribute", byref(supported), SUPPORTED, device.value)
        if not supported.value:
            raise Unsupported(f"cuda:{index} has no virtual memory management", "set restorable=false")
        self._location = _Location(DEVICE, device.value)
        self._properties = _Properties(type=PINNED, location=self._location)
        granule = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granule), byref(self._properties), MINIMUM)
        self._granule = granule.value

    def map(self, nbytes: int) -> Mapping:
        """New addresses with memory behind them. Raises `OutOfMemory`."""
        size = -(-max(nbytes, 1) // self._granule) * self._granule
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        made = Mapping(self, address.value, size, nbytes)
        made.remap()  # where it fails, the addresses go with the mapping
        return made

    def back(self, address: int, size: int) -> None:
        """Put memory behind addresses; what the framework's allocator caches is given up for it, if need be."""
        handle = c_ulonglong()
        code = self._create(handle, size)
        if code == OUT_OF_MEMORY:
            self._trim()
            code = self._create(handle, size)
        if code == OUT_OF_MEMORY:
            raise self._refused(size)
        self._lib.check(code, "cuMemCreate", nbytes=size)
        try:
            self._call("cuMemMap", address, size, 0, handle.value, 0)
        finally:
            self._call("cuMemRelease", handle.value)  # the mapping keeps the memory
        try:
            self._call("cuMemSetAccess", address, size, byref(_Access(self._location, READ_WRITE)), 1)
        except BaseException:
            self._call("cuMemUnmap", address, size)
            raise

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def reclaim(self) -> None:
        """Give back what belongs to mappings that are gone; views of theirs may be read until the device is idle."""
        gone = [self.gone.popleft() for _ in range(len(self.gone))]
        try:
            if gone:
                self._idle()
        except BaseException:
            self.gone.extend(gone)
            raise
        for address, size, mapped in gone:
            if mapped:
                self.unmap(address, size)
            self._call("cuMemAddressFree", address, size)

    def _create(self, handle: c_ulonglong, size: int) -> int:
        with self._lib.current(self._context), self._lib.relaxed():
            return self._calls["cuMemCreate"](byref(handle), size, byref(self._properties), 0)

    def _call(self, verb: str, *arguments: object) -> None:
        with self._lib.current(self._context), self._lib.relaxed():
            code = self._calls[verb](*arguments)
        self._lib.check(code, verb, arguments=[hex(one) for one in arguments if isinstance(one, int)])
