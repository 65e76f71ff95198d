"""A process joins the ranks its environment names, or is told what keeps it from it."""

from __future__ import annotations

import pytest
import torch

from dsv4.errors import ModelConfigError
from dsv4.model.presets import MIXED
from dsv4.parallel import ParallelError, Ranks, group
from dsv4.shard import Shard


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}])
def test_a_process_on_its_own_joins_nothing(environment: dict[str, str]) -> None:
    found = group("cpu", environment)
    assert found == Ranks(0, 1, torch.device("cpu"))
    assert found.all_reduce is None
    found.agree(MIXED, seed=0)
    found.close()
    assert not torch.distributed.is_initialized()


def test_an_incomplete_environment_names_what_is_missing() -> None:
    with pytest.raises(ParallelError, match="RANK, MASTER_PORT are not set") as refused:
        group("cpu", {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"})
    assert "torchrun --nproc-per-node 2" in refused.value.remedy


WHOLE = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        *(("WORLD_SIZE", value, "1 to 9999") for value in ("two", "", "0", "-2", "2.0", "9" * 5000)),
        *(("RANK", value, "0 to 1") for value in ("first", "", "2", "-1")),
        *(("LOCAL_RANK", value, "0 to 1") for value in ("x", "2", "-1")),
        *(("MASTER_PORT", value, "1 to 65535") for value in ("http", "0", "65536", "-1")),
    ],
    ids=lambda value: value[:12],
)
def test_a_number_of_the_environment_that_is_none_is_named(name: str, value: str, bounds: str) -> None:
    """Before anything is joined."""
    with pytest.raises(ParallelError, match=f"{name}='{value[:80]}' is no integer from {bounds}") as refused:
        group("cpu", WHOLE | {name: value})
    assert refused.value.fields["value"] == value
    assert not torch.distributed.is_initialized()


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ParallelError, match="local rank 1 has no GPU: this host has 1"):
        group("cuda", WHOLE)


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        (16, {"num_attention_heads=8", "o_groups=4", "n_routed_experts=8"}),
        (8, {"o_groups=4"}),
        (3, {"num_attention_heads=8", "o_groups=4", "n_routed_experts=8", "moe_intermediate_size=64"}),
    ],
)
def test_what_the_ranks_cannot_share_is_listed(ranks: int, named: set[str]) -> None:
    with pytest.raises(ModelConfigError) as refused:
        Shard(MIXED, tensor_parallel=ranks)
    assert {problem.partition(" is not")[0] for problem in refused.value.problems} == named


@pytest.mark.parametrize("rank", (-1, 2, "0", True))
def test_a_rank_is_one_of_the_ranks(rank: object) -> None:
    with pytest.raises(ModelConfigError, match="must be one of 0 to 1"):
        Shard(MIXED, tensor_parallel=2, rank=rank)  # type: ignore[arg-type]
