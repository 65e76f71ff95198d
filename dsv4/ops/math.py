"""Arithmetic that several reference kernels share, in float32 or float64."""

from __future__ import annotations

import torch


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """float64 as it is, everything else as float32."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def normed(rows: torch.Tensor, eps: float) -> torch.Tensor:
    """rows * rsqrt(mean(rows**2) + eps) over the last dim."""
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


def rotated(rows: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """RoPE on the tail of the last dim, interleaved pairs (2i, 2i+1).

    Parameters
    ----------
    rows
        [T, ..., D].
    cos_sin
        [T, R], the table's rows of each token's position: R/2 cosines, then R/2 sines. R dims are rotated.
    inverse
        Rotate by the negative angle.
    """
    width = cos_sin.shape[-1]
    shape = (rows.shape[0], *(1,) * (rows.dim() - 2), width // 2)
    cos, sin = (part.to(rows.dtype).view(shape) for part in cos_sin.split(width // 2, -1))
    if inverse:
        sin = -sin
    even, odd = rows[..., -width::2], rows[..., -width + 1 :: 2]
    tail = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((rows[..., :-width], tail), -1)
