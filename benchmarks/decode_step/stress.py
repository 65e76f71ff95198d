"""Bits under delays: every safe strategy against `caching`, 1,000 steps a mode; `unfenced` as the control."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.decode_step.model import Bench
from tests.dsv4.model.cells import SAFE, Setting
from tests.dsv4.model.cuda_cells import delays, mismatches

CONTROLS = ("eager", "narrow")
"""Modes in which `unfenced` runs with two micro-batches, too."""


def measure(mode: str, steps: int) -> list[dict[str, Any]]:
    """A row for each cell: steps run, and steps whose bits are not those of `caching` without delays."""
    alone: Setting = (mode, True, 1)
    two: Setting = (mode, True, 2)
    cells = [(strategy, alone, steps) for strategy in SAFE] + [(strategy, two, steps // 4) for strategy in SAFE]
    if mode in CONTROLS:
        cells.append(("unfenced", two, min(steps, 100)))
    found: list[dict[str, Any]] = []
    for strategy, setting, count in cells:
        began = time.perf_counter()
        try:
            ran, wrong = mismatches("small", strategy, setting, count, seed=len(found), poison=strategy in SAFE)
            row: dict[str, Any] = {"steps": ran, "mismatches": wrong}
        except Exception as error:  # a cell that fails is a result, too
            row = {"failed": f"{type(error).__name__}: {error}"[:400]}
        found.append({"strategy": strategy, "mode": mode, "micro_batches": setting[2]} | row)
        found[-1]["seconds"] = round(time.perf_counter() - began, 1)
        print(found[-1], flush=True)
    return found


def deep(bench: Bench, steps: int = 20) -> list[dict[str, Any]]:
    """The same at all 43 layers, a decode step at the benchmark's context: a few steps a strategy and mode."""
    found: list[dict[str, Any]] = []
    for mode in CONTROLS:
        ws, runner = bench.runner("caching", mode)
        wanted = runner.logits(bench.step(runner).hidden)
        torch.cuda.synchronize()
        runner.close()
        for strategy in SAFE:
            with delays(len(found)):
                ws, runner = bench.runner(strategy, mode)
                wrong = sum(not torch.equal(runner.logits(bench.step(runner).hidden), wanted) for _ in range(steps))
                runner.close()
                ws.synchronize()
            found.append(
                {
                    "strategy": strategy,
                    "mode": mode,
                    "micro_batches": 1,
                    "steps": steps,
                    "mismatches": wrong,
                    "layers": 43,
                }
            )
    return found
