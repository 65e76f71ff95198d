"""A model's weights come from a source tensor by tensor: it is never in memory as a whole besides them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import Checkpoint, save
from dsv4.config import reduced
from dsv4.model.precision import Precision
from dsv4.model.presets import MIXED
from dsv4.model.random_weights import RandomTensors, random_tensors
from dsv4.model.weights import Assembly
from dsv4.shard import Shard

SOURCES = "random", "deepseek", "transformers", "quantised"


class Watched(Mapping[str, torch.Tensor]):
    """A source that counts how many of the tensors it gave out are alive at each request."""

    def __init__(self, source: Mapping[str, torch.Tensor]) -> None:
        self.source = source
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.most = max(self.most, sum(one() is not None for one in self.given))
        found = self.source[name]
        self.given.append(weakref.ref(found))
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def source(kind: str, path: Path) -> Mapping[str, torch.Tensor]:
    if kind == "random":
        return RandomTensors(MIXED, 0)
    format = "transformers" if kind == "transformers" else "deepseek"
    save(path, RandomTensors(MIXED, 0), MIXED, format, quantised=kind == "quantised")
    return Checkpoint(path)


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("kind", SOURCES)
def test_one_tensor_of_the_source_is_alive_at_a_time(kind: str, ranks: int, tmp_path: Path) -> None:
    """In float64, so that no weight is a tensor of the source itself; token tables are, and stay."""
    watched = Watched(source(kind, tmp_path))
    shard = Shard(MIXED, tensor_parallel=ranks, attention="flashinfer")
    gc.disable()
    try:
        assembly = Assembly(shard, Precision(torch.float64), watched)
        kept = assembly.model(), assembly.draft()
    finally:
        gc.enable()
    assert kept and len(watched.given) > 100
    assert watched.most <= 1 + MIXED.num_hash_layers


def test_a_dict_of_tensors_is_alive_as_a_whole() -> None:
    """Control."""
    watched = Watched(random_tensors(MIXED, 0))
    Assembly(Shard(MIXED, attention="flashinfer"), Precision(torch.float64), watched).model()
    assert watched.most > 100


def test_tensors_by_seed_depend_on_nothing_else() -> None:
    """Whatever was made before, and however many layers the model has."""
    whole, few = RandomTensors(MIXED, 3), RandomTensors(reduced(MIXED, layers=2), 3)
    for name in reversed(list(few)):
        assert torch.equal(whole[name], few[name])
    assert not torch.equal(whole["embed.weight"], RandomTensors(MIXED, 4)["embed.weight"])
    assert whole.keys() == random_tensors(MIXED, 3).keys()
