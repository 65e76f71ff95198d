"""Two processes that share a model compute what one computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4.model.presets import MIXED
from dsv4.parallel import Ranks
from tests.dsv4.parallel.spawned import RANKS, spawned
from tests.dsv4.parallel.worker import GENERATED, LENGTH, computed, in_two_micro_batches

TOLERANCE = 1e-4
"""Of logits with a standard deviation of 1, float32: partial sums are added in another order."""

STRATEGIES = "event_fenced", "caching"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found, over gloo."""
    return spawned(tmp_path_factory.mktemp("ranks"), "cpu")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return computed(Ranks(0, 1, torch.device("cpu")), "event_fenced")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_give_the_tokens_of_one(strategy: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Greedy tokens are equal, logits (those of the MTP block, too) within the tolerance; no lease is left behind."""
    assert len(alone["logits"]) == LENGTH + GENERATED and alone["logits"].std() > 0.5
    for rank in ranks:
        found = rank[strategy]
        assert found["tokens"] == alone["tokens"]
        assert (found["logits"] - alone["logits"]).abs().max() <= TOLERANCE
        assert (found["draft"] - alone["draft"]).abs().max() <= TOLERANCE
        assert found["leased"] == alone["leased"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_hold_the_same_bits(strategy: str, ranks: list[dict[str, Any]]) -> None:
    """Every rank samples from the same logits, so none needs to be told the token."""
    first, second = (rank[strategy] for rank in ranks)
    assert torch.equal(first["logits"], second["logits"]) and torch.equal(first["draft"], second["draft"])


def test_sums_of_two_micro_batches_do_not_meet(ranks: list[dict[str, Any]]) -> None:
    wanted = in_two_micro_batches(Ranks(0, 1, torch.device("cpu")))
    assert wanted.std() > 0.5
    for rank in ranks:
        assert (rank["micro_batches"] - wanted).abs().max() <= TOLERANCE


def test_without_the_sums_a_rank_has_its_part_only(alone: dict[str, Any]) -> None:
    """Control: one rank of two that nobody sums with."""
    found = computed(Ranks(0, RANKS, torch.device("cpu")), "event_fenced", summing=False)
    assert (found["logits"] - alone["logits"]).abs().max() > 1000 * TOLERANCE


SPLIT = {"wq_b": 1, "wo_a": 0, "wo_b": 0}


def test_each_rank_holds_its_share_of_the_same_weights(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Heads, output groups, experts and the shared expert's inner columns, in rank order; the rest is whole."""
    whole = alone["layer"]
    layers = [rank["event_fenced"]["layer"] for rank in ranks]
    for name, tensor in whole["attention"].items():
        if name in SPLIT:
            joined = torch.cat([layer["attention"][name] for layer in layers], SPLIT[name])
            assert torch.equal(joined, tensor), name
    heads = MIXED.num_attention_heads // RANKS
    sinks = [layer["attention"]["sink"] for layer in layers]
    assert torch.equal(torch.cat([one[:heads] for one in sinks]), whole["attention"]["sink"])
    assert all(one[heads:].isneginf().all() for one in sinks)
    experts = [layer["experts"] for layer in layers]
    for name in ("w13", "w2"):
        assert torch.equal(torch.cat([one[name] for one in experts]), whole["experts"][name])
    assert all(torch.equal(one["gate"], whole["experts"]["gate"]) for one in experts)
    gates, ups = zip(*(one["shared"]["w13"].chunk(2, 1) for one in experts), strict=True)
    assert torch.equal(torch.cat((*gates, *ups), 1), whole["experts"]["shared"]["w13"])
    assert torch.equal(torch.cat([one["shared"]["w2"] for one in experts]), whole["experts"]["shared"]["w2"])


def test_ranks_started_differently_are_told_what_differs(ranks: list[dict[str, Any]]) -> None:
    """On every rank alike, with each rank's value; what agrees is not mentioned."""
    for rank in ranks:
        assert "index_topk is 32 on rank 0, 8 on rank 1" in rank["refused"]
        assert "seed is 0 on rank 0, 1 on rank 1" in rank["refused"]
        assert "layers" not in rank["refused"]
