"""Products with weight matrices, into the caller's memory.

On a GPU those of a few rows are a kernel of this package: a call of cuBLAS by way of PyTorch takes the host longer than
the product takes the device.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4.ops import kernels
from dsv4.ops.kernels import dispatch_modes, function_modes
from dsv4.ops.math import wide
from workspace import Slot

FEW = 8
"""Rows that the kernel takes."""


def linear(x: Any, weight: torch.Tensor, out: Any, add: bool = False) -> Any:
    """x [T, K] times weight [K, N], into out [T, N]; all of one dtype. K and N may be two dims of x and out each.

    Parameters
    ----------
    weight
        A transposed view: its columns are contiguous.
    out
        May be a slot.
    add
        Add the product to what out holds.
    """
    if not (dispatch_modes() or function_modes()) and _few(x, weight, add, out):
        return out
    if type(out) is Slot:
        if _takes(weight, out):
            return linear(x, weight, out.tensor(), add)
        return out.fill(torch.mm(x.flatten(1), weight).view(out.shape))
    if add:
        return out.addmm_(x, weight)
    torch.mm(x.flatten(1), weight, out=out.flatten(1))
    return out


def linear_wide(x: Any, weight: torch.Tensor, out: Any) -> Any:
    """As `linear`, accumulated and kept in float32 (float64 for float64)."""
    if not (dispatch_modes() or function_modes()) and _few(x, weight, False, out):
        return out
    if weight.dtype is not torch.bfloat16 or not weight.is_cuda:
        return torch.mm(wide(x), wide(weight), out=out)
    # Tensor cores sum in float32 as it is; a wide copy of the weights would be made at every call.
    if type(out) is Slot:
        if _takes(weight, out):
            return linear_wide(x, weight, out.tensor())
        return out.fill(torch.mm(x, weight, out_dtype=torch.float32))
    return torch.mm(x, weight, out_dtype=torch.float32, out=out)


def linear_grouped(x: Any, weight: torch.Tensor, out: Any) -> None:
    """x [G, T, K] times weight [G, K, N], into out [T, G, N]; the weights' columns are contiguous."""
    if type(out) is Slot and _takes(weight, out):
        out = out.tensor()
    if dispatch_modes() or function_modes() or not _few(x, weight, False, out):
        torch.bmm(x, weight, out=out.transpose(0, 1))


_few: Any = kernels.FAST.get("few_linear", lambda *_: False)
"""Computes the product and returns True, or False where it is not for it: more rows, other dtypes, slots."""


def _takes(weight: torch.Tensor, out: Slot) -> bool:
    """Whether the kernel would write a slot's tensor."""
    few = out.shape[0] <= FEW and weight.is_cuda and weight.dtype is torch.bfloat16
    return few and "few_linear" in kernels.FAST and not (dispatch_modes() or function_modes())
