"""Products with weight matrices, into the caller's memory."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.ops.math import wide


def linear(x: Any, weight: torch.Tensor, out: Any) -> Any:
    """x [T, K] times weight [N, K] transposed, into out [T, N]; all of one dtype. Any of them may be a slot."""
    return torch.mm(x, weight.T, out=out)


def linear_wide(x: Any, weight: torch.Tensor, out: Any) -> Any:
    """As `linear`, accumulated and kept in float32 (float64 for float64)."""
    return torch.mm(wide(x), wide(weight).T, out=out)
