"""Products with weight matrices, into the caller's memory."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.ops.math import wide
from workspace import Slot


def linear(x: Any, weight: torch.Tensor, out: Any) -> Any:
    """x [T, K] times weight [K, N], into out [T, N]; all of one dtype. x and out may be slots."""
    if type(out) is Slot:
        return out.fill(torch.mm(x, weight))
    return torch.mm(x, weight, out=out)


def linear_wide(x: Any, weight: torch.Tensor, out: Any) -> Any:
    """As `linear`, accumulated and kept in float32 (float64 for float64)."""
    if weight.dtype is torch.bfloat16 and weight.is_cuda:
        # Its tensor cores sum in float32 as it is; a wide copy of the weights would be made at every call.
        if type(out) is Slot:
            return out.fill(torch.mm(x, weight, out_dtype=torch.float32))
        return torch.mm(x, weight, out_dtype=torch.float32, out=out)
    return torch.mm(wide(x), wide(weight), out=out)
