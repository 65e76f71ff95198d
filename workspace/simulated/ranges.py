"""Byte ranges of the things a launch may name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from workspace.errors import DeviceError
from workspace.simulated.node import Range
from workspace.simulated.virtual import VirtualTensor

MOST_RUNS = 4096
"""A strided tensor of more separate runs than this is logged as the one interval that spans it."""


def ranges_of(items: Iterable[Any]) -> tuple[Range, ...]:
    """The (address, bytes) ranges of tensors, virtual tensors, pairs and ``__workspace_range__`` objects."""
    if type(items) is tuple and not [i for i in items if type(i) is not tuple or not i[1]]:
        return items
    found: list[Range] = []
    for item in items:
        if type(item) is tuple:
            if item[1]:
                found.append(item)
        elif type(item) is VirtualTensor:
            if item.nbytes:
                found.append((item.address, item.nbytes))
        elif isinstance(item, torch.Tensor):
            found += tensor_ranges(item)
        elif hasattr(item, "__workspace_range__"):
            address, nbytes = item.__workspace_range__()
            if nbytes:
                found.append((address, nbytes))
        else:
            raise DeviceError(
                f"{type(item).__name__} names no bytes of the device",
                "pass tensors, (address, nbytes) pairs or objects with __workspace_range__()",
            )
    return tuple(found)


def tensor_ranges(tensor: torch.Tensor) -> list[Range]:
    """The runs of consecutive bytes a tensor covers, so that interleaved columns are apart."""
    if not tensor.numel():
        return []
    size = tensor.element_size()
    address = tensor.data_ptr()
    if tensor.is_contiguous():
        return [(address, tensor.numel() * size)]
    dims = sorted(((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
                   if length > 1 and stride), reverse=True)  # fmt: skip
    run = 1
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    count = 1
    for _, length in dims:
        count *= length
    if count > MOST_RUNS:
        return [(address, (sum(stride * (length - 1) for stride, length in dims) + run) * size)]
    starts = [0]
    for stride, length in dims:
        starts = [start + stride * index for start in starts for index in range(length)]
    return [(address + start * size, run * size) for start in starts]
