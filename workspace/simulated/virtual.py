"""Tensors that are addresses only: true sizes, no bytes."""

from __future__ import annotations

import math
from typing import Any

import torch

from workspace.errors import LayoutError


class VirtualTensor:
    """A contiguous tensor of a device with ``memory="virtual"``.

    Parameters
    ----------
    address
        First byte.
    nbytes
        Bytes it covers.
    shape
        Dimensions.
    dtype
        Element type.
    keep
        What owns the bytes; a view keeps it alive too, as a view keeps its storage.
    """

    __slots__ = ("__weakref__", "_keep", "_lending", "address", "dtype", "nbytes", "shape")

    def __init__(self, address: int, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype, keep: Any = None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.shape = shape
        self.dtype = dtype
        self._keep = keep
        self._lending: Any = None  # see `workspace.simulated.lendings`

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> VirtualTensor:
        """The tensor this is a view of, or itself: it lives as long as any view."""
        whole = self
        while isinstance(whole._keep, VirtualTensor):
            whole = whole._keep
        return whole

    def handed_out(self, lending: Any) -> VirtualTensor:
        """Another object over the same bytes, of a lending or of none."""
        keep = self._keep if type(self._keep) is VirtualTensor else self
        made = VirtualTensor(self.address, self.nbytes, self.shape, self.dtype, keep)
        made._lending = lending
        return made

    def _view(self, address: int, nbytes: int, shape: tuple[int, ...]) -> VirtualTensor:
        made = VirtualTensor(address, nbytes, shape, self.dtype, self)
        made._lending = self._lending
        return made

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def view(self, *shape: int) -> VirtualTensor:
        """The same bytes under another shape of as many elements."""
        if math.prod(shape) != self.numel():
            raise LayoutError(
                f"shape {shape} has {math.prod(shape)} elements, the tensor has {self.numel()}",
                "view needs the same number of elements",
            )
        return self._view(self.address, self.nbytes, shape)

    def __getitem__(self, rows: slice) -> VirtualTensor:
        """Consecutive rows, sharing the bytes (``tensor[2:5]``)."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise LayoutError(f"step {step} is not contiguous", "virtual tensors slice consecutive rows only")
        count = max(0, stop - start)
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        shape = (count, *self.shape[1:])
        return self._view(self.address + start * row, count * row, shape)

    def __repr__(self) -> str:
        return f"VirtualTensor({self.address:#x}, {self.nbytes} B, {self.shape}, {self.dtype})"
