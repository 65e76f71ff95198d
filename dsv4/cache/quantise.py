"""Number formats of the caches and of quantised activations: FP8 E4M3, FP4 E2M1, UE8M0 scales.

A UE8M0 byte b stands for 2**(b-127). Scales are rounded up, so that a block's largest value never overflows; values
are clamped to the format and rounded to nearest even. Sources: vLLM ``cache_utils.py``, ``fused_indexer_q.py`` and
``fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu``; OCP microscaling formats 1.0 for E2M1.
"""

from __future__ import annotations

import enum

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP4_MAX = 6.0
BIAS = 127

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; bit 3 is the sign, and survives for zero."""

FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Floor(enum.IntEnum):
    """What keeps the scale of a block of zeros finite."""

    ABSMAX = 0
    """``max(absmax, 1e-4) / 448`` (vLLM's sliding-window writer): the smallest byte is 105."""
    SCALE = 1
    """``max(absmax / 448, 1e-4)`` (vLLM's CuTeDSL C4 and C128 writer): the smallest byte is 114."""


def exponent(scale: torch.Tensor) -> torch.Tensor:
    """ceil(log2(scale)), exactly: int32 [...] for positive float [...]."""
    mantissa, power = torch.frexp(scale)
    return torch.where(mantissa == 0.5, power - 1, power)


def fp8_exponent(absmax: torch.Tensor, floor: float = 1e-4, rule: Floor = Floor.ABSMAX) -> torch.Tensor:
    """Exponent of the scale of FP8 blocks with these largest magnitudes; int32 like absmax."""
    if rule is Floor.ABSMAX:
        return exponent(absmax.clamp(min=floor) / FP8_MAX)
    return exponent((absmax / FP8_MAX).clamp(min=floor))


def to_fp8(values: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
    """values / 2**power, saturated to +-448 and rounded to nearest even; float8_e4m3fn [...]."""
    return torch.ldexp(values, -power).clamp(-FP8_MAX, FP8_MAX).to(torch.float32).to(FP8)


def to_fp4_codes(values: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of values already divided by their scale; uint8 [...], sign in bit 3."""
    size = values.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for step, middle in enumerate(FP4_MIDPOINTS):
        # Step s leads from code s to s + 1: a midpoint goes to whichever of the two is even.
        code += (size >= middle if step % 2 else size > middle).to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even element in the low nibble: uint8 [..., D] to uint8 [..., D/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def from_fp4(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of packed codes: uint8 [..., D/2] to dtype [..., D]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    values = torch.tensor(FP4_VALUES, dtype=dtype, device=packed.device)
    return torch.where(codes >= 8, -values[codes & 7], values[codes & 7])


def quantise_fp4(values: torch.Tensor, block: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4: packed codes uint8 [..., D/2] and UE8M0 bytes uint8 [..., D/block] of values [..., D]."""
    blocks = values.unflatten(-1, (-1, block))
    absmax = blocks.abs().amax(-1).clamp(min=FP4_MAX * 2.0**-126)
    power = exponent(absmax / FP4_MAX).clamp(-127, 127)
    codes = to_fp4_codes(torch.ldexp(blocks, -power[..., None])).flatten(-2)
    return pack_fp4(codes), (power + BIAS).to(torch.uint8)


def dequantise_fp4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: int = 32) -> torch.Tensor:
    """Values [..., D] of packed codes uint8 [..., D/2] and UE8M0 bytes uint8 [..., D/block]."""
    values = from_fp4(packed, dtype).unflatten(-1, (-1, block))
    return torch.ldexp(values, (scales.int() - BIAS)[..., None]).flatten(-2)
