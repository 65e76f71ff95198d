"""Products with weight matrices, into the caller's memory."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.ops.math import wide
from workspace import Slot


def linear(x: Any, weight: torch.Tensor, out: Any) -> Any:
    """x [T, K] times weight [N, K] transposed, into out [T, N]; all of one dtype. Any of them may be a slot."""
    if type(out) is Slot:
        return out.fill(torch.mm(x, weight.T))
    return torch.mm(x, weight.T, out=out)


def linear_wide(x: Any, weight: torch.Tensor, out: Any) -> Any:
    """As `linear`, accumulated and kept in float32 (float64 for float64)."""
    if x.is_cuda and x.dtype is weight.dtype is torch.bfloat16:
        # Its tensor cores sum in float32 as it is; a wide copy of the weights would be made at every call.
        if type(out) is Slot:
            return out.fill(torch.mm(x, weight.T, out_dtype=torch.float32))
        return torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
    return torch.mm(wide(x), wide(weight).T, out=out)
