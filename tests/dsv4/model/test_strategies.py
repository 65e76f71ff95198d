"""Where scratch comes from changes no bit of the logits on the CPU; `test_matrix` has virtual streams and run modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workspace
from dsv4.model.presets import MIXED
from tests.dsv4.model.made import context, decoder, prompt, step

SAFE = ("caching", "event_fenced", "per_stream")
LENGTHS = 135, 70


def served(ws: Any, aux_streams: bool = True) -> torch.Tensor:
    """Logits of a prompt in two chunks, the second beside another prompt, then decode rows of both."""
    model = decoder(MIXED, ws=ws, aux_streams=aux_streams, capacity=512)
    contexts = {i: context(model, prompt(MIXED, length + 2, i)) for i, length in enumerate(LENGTHS)}
    first, second = LENGTHS
    kept = ws.snapshot().allocated
    found = [step(model, contexts, (0, 0, 100, True))[1]]
    found.append(step(model, contexts, (0, 100, first - 100, True), (1, 0, second, True))[1])
    for turn in range(2):
        found.append(step(model, contexts, (0, first + turn, 1, False), (1, second + turn, 1, False))[1])
    assert ws.snapshot().allocated == kept
    return torch.cat(found)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return served(workspace.create("caching", device="cpu"))


@pytest.mark.parametrize("aux_streams", (True, False))
@pytest.mark.parametrize("strategy", SAFE)
def test_logits_are_bit_equal_under_every_safe_strategy(
    strategy: str, aux_streams: bool, expected: torch.Tensor
) -> None:
    """On device="cpu", with and without aux streams; no lease is left behind."""
    assert torch.equal(served(workspace.create(strategy, device="cpu"), aux_streams), expected)


def test_a_strategy_shares_bytes_between_stages() -> None:
    """Scratch in a pool is less than the sum of what the stages lease: equal bits are not for want of reuse."""
    ws = workspace.create("event_fenced", device="cpu", statistics=True)
    served(ws)
    owners = ws.snapshot().owners
    assert {"preparation", "attention", "attention_output", "experts"} <= owners.keys()
    assert ws.snapshot().peak_allocated < sum(one.peak for one in owners.values())
