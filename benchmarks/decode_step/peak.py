"""The most bytes that a step of many tokens has allocated, the workspace's own included, under each strategy."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from benchmarks.decode_step.model import BASELINE, ENGINE, Bench, flash
from benchmarks.decode_step.step import close
from dsv4.scheduler import Rows

TOKENS = 8192
LAYERS = 6


def measure() -> dict[str, Any]:
    """Prefill of one prompt of 8,192 tokens in one step, through six layers, two of each kind."""
    config = attrs.evolve(flash(LAYERS), compress_ratios=(0, 4, 128, 4, 128, 0, 0))
    bench = Bench(config, attrs.evolve(ENGINE, max_num_batched_tokens=TOKENS))
    return {name: _peak(bench, name) for name in (BASELINE, "upstream", "caching", "event_fenced", "per_stream")}


def _peak(bench: Bench, name: str) -> dict[str, Any]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    ws, runner = bench.runner(name)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        outcome = runner.forward([Rows(0, 0, TOKENS, True, True)], bench.contexts)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del outcome
        bench.contexts[0].free()
    held = ws.snapshot()
    found = {"peak_bytes": peak, "reserved_bytes": held.reserved, "fences": held.fences}
    close(ws, runner)
    return found
