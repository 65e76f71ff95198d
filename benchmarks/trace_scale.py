"""A long run: 10,000 steps of the 43 layers of Flash, eager, one process for each strategy.

Timed on the device of the sweep's host cost (`workspace.sweep.cell`). Memory is the process's resident set, after
a tenth of the steps and at the end.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import torch

from benchmarks.figure import Figure
from benchmarks.replay import open_workspace, session_and_steps
from workspace.sweep.devices import TimedDevice

STEPS = 10_000
STRATEGIES = ("caching", "event_fenced", "per_stream")


def figures() -> list[Figure]:
    """All figures of this benchmark."""
    found = []
    context = multiprocessing.get_context("spawn")
    for strategy in STRATEGIES:
        with context.Pool(1) as pool:
            seconds, early, late = pool.apply(_run, (strategy,))
        found += [
            Figure(f"{strategy}: {STEPS:,} steps", seconds, "s", 60.0),
            Figure(f"{strategy}: resident at the end / after a tenth", late / early, "ratio", 1.05),
            Figure(f"{strategy}: resident at the end", late / (1 << 20), "MiB"),
        ]
    return found


def _run(strategy: str) -> tuple[float, int, int]:
    """Seconds on one core, and resident bytes after a tenth of the steps and at the end."""
    torch.set_num_threads(1)
    session, steps = session_and_steps(STEPS)
    with torch.no_grad():
        ws = open_workspace(strategy, TimedDevice(memory="virtual", log=False))
        runner = session.prepare(ws, "eager", True, 1)
        began = time.process_time()
        for step in steps[: STEPS // 10]:
            runner.run(step)
        early = _resident()
        for step in steps[STEPS // 10 :]:
            runner.run(step)
        return time.process_time() - began, early, _resident()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
