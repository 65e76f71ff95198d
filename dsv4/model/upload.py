"""A step's metadata brought to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

from dsv4.model.metadata import Metadata

ALIGNMENT = 16
"""Arrays start at multiples of this."""

VIEWS_KEPT = 4096

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

    def packed(self) -> Any:
        """uint8 [nbytes]."""
        found = np.zeros(self.nbytes, np.uint8)
        for offset, array in self._arrays:
            found[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return found


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
        packed = torch.from_numpy(arrays.packed())
        staged = packed.pin_memory() if self._memory.is_cuda else packed
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


def upload(host: Metadata, like: torch.Tensor) -> Metadata:
    """Metadata in fresh memory of a tensor's device."""
    return Buffer(like.new_empty(size(host), dtype=torch.uint8)).fill(host)


def size(host: Metadata) -> int:
    """Bytes that metadata takes on the device."""
    arrays = Arrays()
    mapped(host, arrays.add)
    return arrays.nbytes


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A structure of arrays with the function's results in their places."""
    if isinstance(value, np.ndarray):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(one, function) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(mapped(one, function) for one in value)
    if attrs.has(type(value)):
        own = {field.name: mapped(getattr(value, field.name), function) for field in attrs.fields(type(value))}
        return type(value)(**own)
    return value
