"""Matrices as the published checkpoints quantise them: FP8 in blocks of 128 x 128, experts in FP4 by 32.

FP8 is E4M3 with a scale a block, as a UE8M0 byte or in float32. FP4 is MXFP4: two E2M1 codes a byte, the even column in
the low nibble, and a UE8M0 byte for 32 columns.
"""

from __future__ import annotations

import torch

from dsv4.cache.quantise import BIAS, FP8, FP8_MAX, exponent
from dsv4.cache.quantise import from_fp4 as from_fp4_codes

BLOCK = 128
FP4_BLOCK = 32

E8M0 = torch.float8_e8m0fnu

PAIRS = from_fp4_codes(torch.arange(256, dtype=torch.uint8)[:, None], torch.float32)
"""The two values of each byte of FP4 [256, 2]: one look-up for both, as a checkpoint has billions of them."""


def fp8_scale_shape(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // BLOCK), -(-columns // BLOCK)


def scales(stored: torch.Tensor) -> torch.Tensor:
    """float32 [...] of stored scales: a byte b stands for 2**(b-127), whatever its dtype; floats for themselves."""
    if stored.dtype in (E8M0, torch.uint8):
        stored = stored.view(E8M0)
    return stored.float()


def from_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] of float8_e4m3fn [N, K] and its scales [ceil(N/128), ceil(K/128)]."""
    found = weight.float()
    factors = scales(scale)
    for row, factor in enumerate(factors.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]):
        found[row * BLOCK : (row + 1) * BLOCK] *= factor
    return found


def from_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] of packed codes [N, K/2], int8 or uint8, and UE8M0 bytes [N, K/32]."""
    codes = packed.view(torch.uint8).flatten().int()
    values = PAIRS.to(packed.device).index_select(0, codes).view(packed.shape[0], -1, FP4_BLOCK)
    return values.mul_(scales(scale)[..., None]).flatten(1)


def to_fp8(weight: torch.Tensor, *, wide_scales: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [N, K] and scales [ceil(N/128), ceil(K/128)]: E8M0, rounded up, or absmax / 448 in float32."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    factors = blocks.abs().amax((1, 3)).clamp(min=FP8_MAX * 2.0**-126) / FP8_MAX
    stored = factors
    if not wide_scales:
        power = exponent(factors)
        stored = (power + BIAS).to(torch.uint8).view(E8M0)
        factors = stored.float()
    codes = (blocks / factors[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), stored
