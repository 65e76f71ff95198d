"""Bits under delays: every safe strategy against `caching`, 1,000 steps a mode; `unfenced` as the control."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.decode_step.model import CONTEXT, SAFE, Bench
from benchmarks.decode_step.step import close
from dsv4.scheduler import Rows
from tests.dsv4.model.cells import Setting
from tests.dsv4.model.cuda_cells import STEPS, delays, mismatches
from workspace.sweep.workload import MODES

CONTROLLED = 100
"""Steps of each control."""

CONTROL_SECONDS = 90


def measure(mode: str, steps: int) -> list[dict[str, Any]]:
    """A row for each cell: steps run, and steps whose bits are not those of `caching` without delays."""
    alone: Setting = (mode, True, 1)
    two: Setting = (mode, True, 2)
    cells = [(strategy, alone, steps) for strategy in SAFE] + [(strategy, two, steps // 4) for strategy in SAFE]
    found: list[dict[str, Any]] = []
    for strategy, setting, count in cells:
        began = time.perf_counter()
        try:
            ran, wrong = mismatches("small", strategy, setting, count, seed=len(found), poison=True)
            row: dict[str, Any] = {"steps": ran, "mismatches": wrong}
        except Exception as error:  # a cell that fails is a result, too
            row = {"failed": f"{type(error).__name__}: {error}"[:400]}
        found.append({"strategy": strategy, "mode": mode, "micro_batches": setting[2]} | row)
        found[-1]["seconds"] = round(time.perf_counter() - began, 1)
        print(found[-1], flush=True)
    return found


def control() -> list[dict[str, Any]]:
    """`unfenced` with two micro-batches in each mode, in processes of their own: it may take the context with it."""
    begun = []
    for mode in MODES:
        command = [sys.executable, "-m", "benchmarks.decode_step.stress", mode]
        begun.append((mode, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
    found: list[dict[str, Any]] = []
    for mode, process in begun:
        try:
            out, problem = process.communicate(timeout=CONTROL_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, problem = process.communicate()
        wrong = [int(line) for line in out.split()]
        row: dict[str, Any] = {"strategy": "unfenced", "mode": mode, "micro_batches": 2, "steps": STEPS * len(wrong)}
        row |= {"mismatches": sum(wrong), "ended": _first_error(problem) if process.returncode else ""}
        found.append(row)
    return found


def _first_error(text: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line and not line.startswith(" ")]
    return (lines or ["killed"])[0][:300]


def deep(bench: Bench, steps: int = 20) -> list[dict[str, Any]]:
    """The same at all layers, steps at the benchmark's context: a few a strategy and mode.

    In mode ``overflow`` a step is one of 12 rows of a prompt, which no graph there takes.
    """
    return [row for mode in MODES for row in _deep(bench, mode, steps)]


def _deep(bench: Bench, mode: str, steps: int) -> list[dict[str, Any]]:
    def logits(runner: Any) -> torch.Tensor:
        if mode == "overflow":
            outcome = runner.forward([Rows(0, CONTEXT - 1, 12, True, True)], bench.contexts)
        else:
            outcome = bench.step(runner)
        found: torch.Tensor = runner.logits(outcome.hidden)
        return found

    ws, runner = bench.runner("caching", mode)
    wanted = logits(runner)
    close(ws, runner)
    found: list[dict[str, Any]] = []
    for strategy in SAFE:
        with delays(len(found)):
            ws, runner = bench.runner(strategy, mode)
            wrong = sum(not torch.equal(logits(runner), wanted) for _ in range(steps))
            close(ws, runner)
        row = {"strategy": strategy, "mode": mode, "micro_batches": 1, "steps": steps, "mismatches": wrong}
        found.append(row | {"layers": bench.config.num_hidden_layers})
        print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    for script in range(CONTROLLED // STEPS):
        print(mismatches("small", "unfenced", (sys.argv[1], True, 2), STEPS, seed=script)[1], flush=True)
