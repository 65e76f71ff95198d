"""What is declared is enough for every step the engine may run, and no step needs more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workspace
from dsv4.cache.caches import Caches
from dsv4.engine import Engine
from dsv4.model.execution import Execution
from dsv4.model.presets import MIXED, TINY
from dsv4.model.reserve import declare, reserve
from dsv4.model.runner import Runner
from dsv4.options import Options
from tests.dsv4.model.made import ENGINE, EXACT, blocks_for, context, decoder, prompt, step
from workspace import simulated
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


@pytest.mark.parametrize("mode", ("full", "narrow", "overflow"))
def test_a_runner_with_graphs_keeps_no_byte_that_was_not_reserved(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches at a long context, whose tables are not small: all that lives on is in what `reserve` said."""
    engine = Engine(max_num_batched_tokens=64, max_num_seqs=32, max_model_len=4096)
    options, made = Options(mode=mode, micro_batches=2), Execution()
    kept: dict[str, int] = {}
    persistent = workspace.Workspace.persistent

    def noted(ws: workspace.Workspace, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        found = persistent(ws, name, shape, dtype)
        kept[name] = found.nbytes
        return found

    monkeypatch.setattr(workspace.Workspace, "persistent", noted)
    with simulated.Device(memory="host", execution="deferred") as device:
        ws = workspace.create("event_fenced", device=device, micro_batches=2)
        held = reserve(ws, made.shard, made.precision, engine, options)
        reserved = dict(kept)
        assert held == sum(reserved.values()) + ws.snapshot().reserved
        caches = [Caches(TINY, made.precision.storage, blocks_for(TINY, 4096)) for _ in range(2)]
        Runner(ws, made.shard, made.precision, engine, made.weights, caches, options).close()
    assert kept == reserved
    # A row of the table of C4 states alone has an entry for 4 tokens of the context.
    rows = min(options.sizes(engine)[-1], engine.max_num_seqs)
    assert reserved["metadata"] == reserved["metadata.1"] > rows * 4096 // 4 * 4


def test_without_a_reservation_a_locked_workspace_refuses() -> None:
    """Control: the same steps do not fit into nothing."""
    ws = workspace.create("event_fenced", device="cpu")
    model = decoder(MIXED, ws=ws)
    ws.lock()
    with pytest.raises(CapacityError):
        step(model, {0: context(model, prompt(MIXED, 10))}, (0, 0, 10, True))
