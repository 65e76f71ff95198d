"""Weights by seed, of any config: every part of the model matters to the logits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch

from dsv4.config import ModelConfig
from dsv4.model.parameters import TOKEN_TABLE, parameters


class RandomTensors(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors under DeepSeek's names, each made when it is asked for.

    A tensor depends on the seed, its own name and its shape only. Matrices keep the variance of what passes through
    them. Norm weights scatter around 1; sinks, biases, positional encodings and hyper-connection bases around 0,
    widely enough that leaving one out shows.

    Parameters
    ----------
    device
        Where they are made, and stay: a GPU is faster, and has values of its own for each seed.

    Attributes
    ----------
    config
        The model; `dsv4.config.reduced` makes one that fits.
    """

    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.seed, self.dtype, self.device = config, seed, dtype, torch.device(device)
        self.shapes = parameters(config)

    def __getitem__(self, name: str) -> torch.Tensor:
        return _tensor(self.config, name, self.shapes[name], self.seed, self.device).to(_dtype(name, self.dtype))

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def random_tensors(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All of `RandomTensors` at once."""
    return dict(RandomTensors(config, seed, dtype))


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if name.endswith(TOKEN_TABLE) else dtype


def _tensor(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    if name.endswith(TOKEN_TABLE):
        # The experts of a token are distinct: the first few of a random order.
        order = torch.rand(shape[0], config.n_routed_experts, generator=generator, device=device).argsort(1)
        return order[:, : shape[1]]
    noise = torch.randn(shape, generator=generator, device=device)
    if name.endswith(("norm.weight", "_scale")):
        return 1 + 0.1 * noise
    if name.endswith("gate.bias"):
        return 0.1 * noise
    if len(shape) == 1 or name.endswith(("embed.weight", "ape")):
        return noise
    return noise.div_(shape[1] ** 0.5)
