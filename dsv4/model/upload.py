"""A step's metadata brought to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import numpy as np
import torch

from dsv4.model.metadata import Metadata

ALIGNMENT = 16
"""Arrays start at multiples of this."""

VIEWS_KEPT = 4096

ROOM = 1 << 16
"""Memory for eager steps is taken by multiples of this."""

TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.bool_): torch.bool}


class Arrays:
    """NumPy arrays one behind the other."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, Any]] = []
        self.nbytes = 0

    def add(self, array: Any) -> int:
        """Append an array; its offset in bytes."""
        offset = self.nbytes
        self._arrays.append((offset, array))
        self.nbytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return offset

    def staged(self, pinned: bool) -> torch.Tensor:
        """uint8 [nbytes] of the host; what lies between two arrays may be anything."""
        if pinned:
            found = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
            self._pack(found.numpy())
            return found
        made = np.empty(self.nbytes, np.uint8)
        self._pack(made)
        return torch.from_numpy(made)

    def _pack(self, out: Any) -> None:
        for offset, array in self._arrays:
            out[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Buffer:
    """Bytes on the device that metadata is copied to.

    Parameters
    ----------
    memory
        uint8 [N], of any device.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._typed = {kind: memory.view(kind) for kind in TYPES.values()}
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}

    def place(self, host: Metadata, arrays: Arrays | None = None) -> Metadata:
        """Where metadata of these shapes lies: arrays with the same ones before them lie where they lay."""
        arrays = arrays or Arrays()
        found: Metadata = mapped(host, lambda array: self._view(arrays.add(array), array.shape, TYPES[array.dtype]))
        return found

    def fill(self, host: Metadata) -> Metadata:
        """Copy metadata to its place, on the current stream."""
        arrays = Arrays()
        found = self.place(host, arrays)
        staged = arrays.staged(self._memory.is_cuda)
        # From pinned memory the host need not wait, and torch reuses it only when the copy is over.
        self._memory[: arrays.nbytes].copy_(staged, non_blocking=True)
        return found

    def _view(self, offset: int, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        key = offset, shape, kind
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= VIEWS_KEPT:
                self._views.clear()
            stride = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
            view = self._views[key] = self._typed[kind].as_strided(shape, stride, offset // kind.itemsize)
        return view


class Uploads:
    """Metadata of one step after the other, in the same bytes: for steps that a stream orders.

    Parameters
    ----------
    like
        A tensor of the device.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._room = 0

    def fill(self, host: Metadata) -> Metadata:
        """Copy a step's metadata to the device, on the current stream; it is there until the next one's."""
        nbytes = size(host)
        if nbytes > self._room:
            self._room = -(-nbytes // ROOM) * ROOM
            self._buffer = Buffer(self._like.new_empty(self._room, dtype=torch.uint8))
        return self._buffer.fill(host)


def size(host: Metadata) -> int:
    """Bytes that metadata takes on the device."""
    arrays = Arrays()
    mapped(host, arrays.add)
    return arrays.nbytes


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A structure of arrays with the function's results in their places."""
    kind: Any = type(value)
    if kind is np.ndarray:
        return function(value)
    if kind is tuple:
        return tuple([mapped(one, function) for one in value])
    if kind is dict:
        return {key: mapped(one, function) for key, one in value.items()}
    names = _fields(kind)
    return kind(*[mapped(getattr(value, name), function) for name in names]) if names else value


@cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(kind)) if attrs.has(kind) else ()
