"""Two GPUs that share a model compute what one computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dsv4.parallel.spawned import RANKS, spawned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"{RANKS} GPUs are needed"),
]

TOLERANCE = 1e-3
"""Of logits with a standard deviation of 1: GEMMs of other shapes sum in another order on a GPU, too."""


def test_two_gpus_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Greedy tokens are equal, logits within the tolerance, and the ranks' bits are the same."""
    (tmp_path / "one").mkdir()
    (one,) = spawned(tmp_path / "one", "cuda", ranks=1)
    alone = one["event_fenced"]
    first, second = spawned(tmp_path, "cuda")
    for strategy in ("event_fenced", "caching"):
        assert first[strategy]["tokens"] == alone["tokens"]
        assert (first[strategy]["logits"] - alone["logits"]).abs().max() <= TOLERANCE
        assert torch.equal(first[strategy]["logits"], second[strategy]["logits"])
