"""Host time of a cell's steps.

The host cost of a step is the thread's CPU time of ``Runner.run(step)``: the model's Python, the framework
(acquire, release, forks, fences, graphs), the simulated device's stand-ins for launch, record and wait, and a
``torch.empty`` on the CPU for each allocation. It leaves out the operations themselves, the access log and
garbage collection. It is not the time of the same step with CUDA: compare strategies by the ratio in one run.

On a machine that does other work, too, CPU time goes up, and never down: cores share caches and execution units. So
each step's least time of several replays counts, and they lie apart, as busy moments last for seconds. A pool is not
the same in each: the first makes its tensors, and later ones find it cut up, and may search longer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

from workspace.sweep.devices import TimedDevice
from workspace.sweep.plan import Cell, Replay
from workspace.sweep.session import prepare
from workspace.sweep.setup import workspace_of
from workspace.sweep.workload import Session, Step


class HostTime:
    """Times a cell's steps, as often as `replay` is called, on one workspace of a device of its own.

    Parameters
    ----------
    allow_unsafe
        Consent to a strategy that does not keep scratch intact; the memory is virtual.
    steps
        What one replay runs.
    """

    def __init__(self, session: Session, replay: Replay, cell: Cell, allow_unsafe: bool, steps: Sequence[Step]) -> None:
        device = TimedDevice(memory="virtual", seed=replay.seed, log=False)
        self._ws = workspace_of(cell, device, allow_unsafe, statistics=False)
        self._runner = prepare(session, self._ws, replay, cell)
        self._steps = steps
        self._taken: list[list[float]] = []

    def replay(self) -> None:
        """Time each step once more."""
        taken = []
        gc.disable()
        try:
            for step in self._steps:
                began = time.thread_time_ns()
                self._runner.run(step)
                taken.append((time.thread_time_ns() - began) / 1000)
        finally:
            gc.enable()
        self._taken.append(taken)

    def close(self) -> None:
        """Give everything back."""
        self._runner.close()
        self._ws.close()

    @property
    def us(self) -> float:
        """Mean over the steps of each one's least time, us."""
        least = [min(times) for times in zip(*self._taken, strict=True)]
        return sum(least) / len(least)

    @property
    def replays_us(self) -> tuple[float, ...]:
        """Of each replay, the mean over the steps, us."""
        return tuple(sum(taken) / len(taken) for taken in self._taken)
