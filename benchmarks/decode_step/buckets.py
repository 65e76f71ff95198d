"""What the graphs of eight sizes hold, over that of the largest alone."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from benchmarks.decode_step.model import ENGINE, Bench, flash
from benchmarks.decode_step.step import close

LAYERS = 6
REQUESTS = 40
"""Sizes of full graphs then are 1, 2, 4, 8, 16, 24, 32 and 40: eight."""

MODES = ("full", "narrow")
STRATEGIES = ("event_fenced", "per_stream", "caching", "upstream")


def measure() -> list[dict[str, Any]]:
    """Bytes of each strategy in each mode, with the largest graph and with all eight."""
    config = attrs.evolve(flash(LAYERS), compress_ratios=(0, 4, 128, 4, 128, 0, 0))
    bench = Bench(config, attrs.evolve(ENGINE, max_num_seqs=REQUESTS, max_num_batched_tokens=512))
    _held(bench, "caching", "narrow", 8)  # what the products of a process take once is taken
    found = []
    for mode in MODES:
        for strategy in STRATEGIES:
            sizes, alone = _held(bench, strategy, mode, 1)
            sizes, every = _held(bench, strategy, mode, 8)
            found.append({"strategy": strategy, "mode": mode, "sizes": sizes, "alone": alone, "all": every})
    return found


def _held(bench: Bench, strategy: str, mode: str, count: int) -> tuple[list[int], dict[str, int]]:
    """Graphs of `count` sizes up to `REQUESTS` tokens, the largest captured first: their sizes, and bytes.

    `footprint`: of the workspace, pinned by graphs. `device`: what PyTorch's allocator holds more of the device than
    before the workspace, graphs' private pools included.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    ws, runner = bench.runner(strategy, mode)
    graphs = runner.graphs[0]
    sizes = [size for size in graphs.sizes if size <= REQUESTS][::-1][:count]
    for size in sizes:
        graphs.capture(size)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    footprint = sum(ws.snapshot().footprints.values())
    held = {"footprint": footprint, "device": torch.cuda.memory_reserved() - before}
    close(ws, runner)
    return sizes, held
