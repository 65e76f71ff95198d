"""Products with weight matrices, into the caller's memory.

On a GPU those of a few rows are a kernel of this package: a call of cuBLAS by way of PyTorch takes the host longer than
the product takes the device.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4.ops import kernels
from dsv4.ops.math import wide
from workspace import Slot

FEW = 8
"""Rows that the kernel takes."""


def linear(x: Any, weight: torch.Tensor, out: Any, add: bool = False) -> Any:
    """x [T, K] times weight [K, N], into out [T, N]; all of one dtype, or out in float32. x and out may be slots.

    Parameters
    ----------
    weight
        A transposed view: its columns are contiguous.
    add
        Add the product to what out holds.
    """
    made = _empty_of(out)
    if made is not None and _few(x, weight, add, made):
        return made
    if add:
        return out.addmm_(x, weight)
    if type(out) is Slot:
        return out.fill(torch.mm(x, weight))
    return torch.mm(x, weight, out=out)


def linear_wide(x: Any, weight: torch.Tensor, out: Any) -> Any:
    """As `linear`, accumulated and kept in float32 (float64 for float64)."""
    if weight.dtype is not torch.bfloat16 or not weight.is_cuda:
        return torch.mm(wide(x), wide(weight), out=out)
    made = _empty_of(out)
    if made is not None and _few(x, weight, False, made):
        return made
    # Tensor cores sum in float32 as it is; a wide copy of the weights would be made at every call.
    if type(out) is Slot:
        return out.fill(torch.mm(x, weight, out_dtype=torch.float32))
    return torch.mm(x, weight, out_dtype=torch.float32, out=out)


def linear_grouped(x: Any, weight: torch.Tensor, out: Any) -> None:
    """x [G, T, K] times weight [G, K, N], into out [T, G, N]; the weights' columns are contiguous."""
    made = _empty_of(out)
    if made is None or not _few(x, weight, False, made):
        torch.bmm(x, weight, out=out.transpose(0, 1))


_few: Any = kernels.FAST.get("few_linear", lambda *_: False)


def _empty_of(out: Any) -> Any:
    """What the kernel writes: the tensor, or that of a slot with few rows; None where something watches every op."""
    if kernels.dispatch_modes() or kernels.function_modes():
        return None
    if type(out) is Slot:
        return out.tensor() if "few_linear" in kernels.FAST and out.shape[0] <= FEW else None
    return out
