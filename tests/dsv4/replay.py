"""A few layers of Flash at true sizes on virtual memory, and steps written out by hand."""

from __future__ import annotations

from typing import Any

import attrs

import workspace
from dsv4.engine import Engine
from dsv4.options import Options
from dsv4.presets import FLASH
from dsv4.runner import Runner
from dsv4.scheduler import Rows, Step
from dsv4.shard import Shard
from workspace import simulated

SMALL = attrs.evolve(FLASH, num_hidden_layers=6, compress_ratios=(0, 4, 128, 128, 4, 128))
ENGINE = Engine(max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=8192)

SAFE = ("event_fenced", "per_stream", "caching")


def step(index: int, decode: int, *prompts: tuple[int, int]) -> Step:
    """A step of `decode` rows at position 3000 and of prompt chunks (start, count)."""
    rows = [Rows(i, 3000 + index, 1, False, True) for i in range(decode)]
    rows += [Rows(decode + i, start, count, True, False) for i, (start, count) in enumerate(prompts)]
    prefill = sum(count for _, count in prompts)
    return Step(index, tuple(rows), decode + prefill, prefill)


STEPS = (
    step(0, 24),
    step(1, 24, (0, 700)),
    step(2, 25),
    step(3, 24, (700, 1500)),
    step(4, 24),
    step(5, 3, (2560, 200)),
)
"""Decode only and mixed, below and above the threshold of 1024 tokens."""


def device(**settings: Any) -> Any:
    return simulated.Device(memory="virtual", **settings)


def run(
    strategy: str,
    options: Options | None = None,
    *,
    steps: tuple[Step, ...] = STEPS,
    shard: Shard | None = None,
    on: Any = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """Replay steps on a fresh device; returns it with the workspace's last snapshot."""
    options = options or Options()
    target = on or device()
    ws = workspace.create(strategy, device=target, allow_unsafe=True, micro_batches=options.micro_batches, **settings)
    runner = Runner(ws, shard or Shard(SMALL), ENGINE, options, steps)
    for one in steps:
        runner.run(one)
    snapshot = ws.snapshot()
    runner.close()
    ws.close()
    return target, snapshot
