"""Tensors on lease that an op, or the caller, has changed in place: whoever got the bytes next would get them so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from workspace.block import Block
    from workspace.request import Request


def changed(request: Request, block: Block, tensors: Iterable[Any]) -> tuple[str, str] | None:
    """Name of the first tensor that is not as it was lent, and what it is now; None where all are.

    Asks no device. Too dear for every release: torch says of a tensor what it is only in Python.
    """
    start = block.address + request.start(block.address)
    for extent, tensor in zip(request.extents, tensors, strict=False):
        if not isinstance(tensor, torch.Tensor):
            continue  # of virtual memory: an address, which no op changes
        shape, now = tuple(extent.shape), tuple(tensor.shape)
        if now != shape:
            return extent.name, f"is of shape {now} instead of {shape}"
        if not tensor.is_contiguous():
            return extent.name, f"has strides {tensor.stride()}"
        if tensor.requires_grad:
            return extent.name, "requires a gradient"
        if extent.nbytes and tensor.data_ptr() != start + extent.offset:
            return extent.name, "is of other bytes"
    return None
