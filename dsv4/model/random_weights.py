"""Weights by seed, of any config: every part of the model matters to the logits."""

from __future__ import annotations

import zlib

import torch

from dsv4.config import ModelConfig
from dsv4.model.parameters import TOKEN_TABLE, parameters


def random_tensors(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors under DeepSeek's names; each depends on the seed and its own name only.

    Matrices keep the variance of what passes through them. Norm weights scatter around 1; sinks, biases, positional
    encodings and hyper-connection bases around 0, widely enough that leaving one out shows.
    """
    return {
        name: _tensor(config, name, shape, seed).to(_dtype(name, dtype)) for name, shape in parameters(config).items()
    }


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if name.endswith(TOKEN_TABLE) else dtype


def _tensor(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    if name.endswith(TOKEN_TABLE):
        # The experts of a token are distinct: the first few of a random order.
        order = torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(1)
        return order[:, : shape[1]]
    noise = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "_scale")):
        return 1 + 0.1 * noise
    if name.endswith("gate.bias"):
        return 0.1 * noise
    if len(shape) == 1 or name.endswith(("embed.weight", "ape")):
        return noise
    return noise / shape[1] ** 0.5
