"""RoPE tables: plain, and YaRN for layers with a compressor."""

from __future__ import annotations

import math

import torch

from dsv4.config import LayerKind, ModelConfig, RopeScaling


def frequencies(width: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype) -> torch.Tensor:
    """Angle per position of each pair, [width/2]; with YaRN the low ones are divided by its factor.

    YaRN (arXiv 2309.00071) blends by d(r) = width * ln(original / (2 pi r)) / (2 ln theta), the pair that turns r
    times over the original context.
    """
    own = 1.0 / theta ** (torch.arange(0, width, 2, dtype=dtype) / width)
    if scaling is None:
        return own

    def pair(turns: float) -> float:
        original = scaling.original_max_position_embeddings
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=dtype) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return own / scaling.factor * (1 - kept) + own * kept


def table(config: ModelConfig, kind: LayerKind, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """cos_sin of one kind of layer, [length, R]: cosines in the first half of the columns, sines in the second.

    SWA-only layers (and the MTP block) use `rope_theta` without YaRN, the others `compress_rope_theta` with it for
    everything in the layer (vLLM #54815).
    """
    swa = kind is LayerKind.SWA
    theta = config.rope_theta if swa else config.compress_rope_theta
    pairs = frequencies(config.qk_rope_head_dim, theta, None if swa else config.rope_scaling, dtype)
    angles = torch.arange(length, dtype=dtype)[:, None] * pairs
    return torch.cat((angles.cos(), angles.sin()), 1)
