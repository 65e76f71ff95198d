"""What is declared is enough for every step the engine may run, and no step needs more."""

from __future__ import annotations

import pytest
import torch

import workspace
from dsv4.model.presets import MIXED
from dsv4.model.reserve import declare
from tests.dsv4.model.made import ENGINE, EXACT, context, decoder, prompt, step
from workspace.errors import CapacityError


def largest_steps(ws: object) -> None:
    """A step of the whole token budget in two prompts, then mixed and decode steps at the longest context."""
    model = decoder(MIXED, ws=ws, capacity=4096)
    contexts = {i: context(model, prompt(MIXED, 1024, i)) for i in range(3)}
    step(model, contexts, (0, 0, 1000, True), (1, 0, 24, True))
    step(model, contexts, (0, 1000, 1, False), (1, 24, 999, True))
    step(model, contexts, (0, 1001, 1, False), (1, 1023, 1, False), (2, 0, 1022, True))
    step(model, contexts, (0, 1002, 1, False), (2, 1022, 1, False))


HEADROOM = 1.5
"""A pool's free bytes are not always in one piece: what lives together fits with room for the pieces between."""


@pytest.mark.parametrize("strategy", ("event_fenced", "per_stream", "caching"))
def test_reserved_scratch_never_grows(strategy: str) -> None:
    """Locked after the reservation, the largest steps run."""
    ws = workspace.create(strategy, device="cpu", headroom=HEADROOM)
    declare(ws, decoder(MIXED).shard, EXACT, ENGINE, draft=True)
    with ws.on(ws.stream("main")):
        ws.persistent("topk_indices", (ENGINE.max_num_batched_tokens, MIXED.index_topk), torch.int32)
    ws.reserve()
    ws.lock()
    largest_steps(ws)
    assert ws.snapshot().growths == 0


def test_without_a_reservation_a_locked_workspace_refuses() -> None:
    """Control: the same steps do not fit into nothing."""
    ws = workspace.create("event_fenced", device="cpu")
    model = decoder(MIXED, ws=ws)
    ws.lock()
    with pytest.raises(CapacityError):
        step(model, {0: context(model, prompt(MIXED, 10))}, (0, 0, 10, True))
