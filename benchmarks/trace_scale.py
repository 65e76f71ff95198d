"""A long run: 10,000 steps of the 43 layers of Flash, eager, one process for each strategy.

Timed on the device of the sweep's host cost (`workspace.sweep.host_time`), where an operation costs its launch alone;
here an allocation costs nothing, so that what is left is the library and the replay. `caching` and `upstream` make 33
tensors a layer, and each passes through the library. Memory is the process's resident set, after a tenth of the steps
and at the end.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.figure import Figure
from benchmarks.replay import open_workspace, session_and_steps
from workspace.sweep.devices import TimedDevice

STEPS = 10_000
STRATEGIES = ("caching", "event_fenced", "per_stream", "upstream", "unfenced")


class FreeDevice(TimedDevice):
    """A device whose allocations cost nothing: nobody looks at the tensors, not even at their size."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int | None = None) -> Any:
        """A thing that stands for the tensor."""
        return object()


def figures() -> list[Figure]:
    """All figures of this benchmark; the strategies run side by side, one core each, as far as there are cores."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(max(1, min(len(STRATEGIES), (os.cpu_count() or 1) // 2)), maxtasksperchild=1) as pool:
        measured = pool.map(_run, STRATEGIES, chunksize=1)
    found = []
    for strategy, (seconds, early, late) in zip(STRATEGIES, measured, strict=True):
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
        ws = open_workspace(strategy, FreeDevice(memory="virtual", log=False))
        runner = session.prepare(ws, "eager", True, 1)
        gc.freeze()  # as serving engines do: what was imported is not walked again
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
