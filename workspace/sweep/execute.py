"""Real numbers: a small configuration computes under seeded schedules, and `caching` says what is right.

Each operator waits on its virtual stream until a seeded schedule runs it; what no edge orders happens in any order. The
results are compared bit for bit with those of `caching` in the same setting, each operator run in the program's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import torch

from workspace.errors import DriverError, Unsupported, WorkspaceError
from workspace.simulated import Device, InOrder, Race, Random, Schedule
from workspace.sweep.plan import REFERENCE, Cell, Replay
from workspace.sweep.protocol import following
from workspace.sweep.result import Numbers
from workspace.sweep.session import find_workload
from workspace.sweep.setup import workspace_of
from workspace.sweep.workload import Execution, Program

Bits = tuple[tuple[tuple[int, ...], str, bytes], ...]
"""Shape, dtype and bytes of each result."""


def execute(replay: Replay, cell: Cell, allow_unsafe: bool) -> Numbers:
    """Run the workload's small configuration in a cell under the replay's number of schedules.

    Raises
    ------
    WorkspaceError
        A safe strategy or the workload refused. What an unsafe one does to results is counted, errors included.
    """
    expected = _reference(replay, attrs.evolve(cell, strategy=REFERENCE))
    left: list[Schedule] = [Random(replay.seed + index) for index in range(replay.schedules)]
    equal = failed = 0
    while left:
        # One device for all, and a fresh one after an operator failed: that error is sticky.
        runs = compute(_execution(replay), cell, left, allow_unsafe)
        equal += sum(bits == expected for bits in runs.bits)
        if runs.error is None:
            break
        if not allow_unsafe and not isinstance(runs.error, DriverError):
            raise runs.error
        failed += 1
        left = left[len(runs.bits) + 1 :]
    return Numbers(replay.schedules, equal, failed)


def open_execution(replay: Replay) -> Execution:
    """The workload's small configuration. Raises `Unsupported` where it has none."""
    workload = find_workload(replay.workload)
    make = getattr(workload, "execution", None)
    if make is None:
        raise Unsupported(
            f"workload {replay.workload!r} computes no numbers", "leave out --execute, or give it an `execution`"
        )
    made: Execution = following(Execution, make(replay.seed), replay.workload)
    return made


_execution = cache(open_execution)


@cache
def _reference(replay: Replay, cell: Cell) -> Bits:
    runs = compute(_execution(replay), cell, [InOrder()], False)
    if runs.error is not None:
        raise runs.error
    return runs.bits[0]


@attrs.frozen
class Runs:
    """Runs of a program on one device.

    Attributes
    ----------
    bits
        What each run computed.
    error
        What ended the last run; it is not among `bits`.
    verdict, races
        The clock check's, of all runs together; ``"UNKNOWN"`` and none where it was not asked.
    """

    bits: list[Bits]
    error: WorkspaceError | None
    verdict: str
    races: list[Race]


def compute(
    execution: Execution, cell: Cell, schedules: Sequence[Schedule], allow_unsafe: bool, *, judged: bool = False
) -> Runs:
    """Run a configuration in a cell, once under each schedule, one after the other on one device.

    Parameters
    ----------
    judged
        Whether the clock check looks at every access, too.
    """
    device = Device(execution="deferred", log=judged)
    found: list[Bits] = []
    stopped = None
    with torch.no_grad(), device:
        ws = workspace_of(cell, device, allow_unsafe, statistics=False)
        try:
            program = execution.prepare(ws, cell.mode, cell.aux_streams, cell.micro_batches)
            following(Program, program, type(execution).__qualname__)
            for schedule in schedules:
                device.queue.schedule = schedule
                found.append(_bits(program.run()))
        except WorkspaceError as error:
            stopped = error
        else:
            program.close()
            ws.synchronize()
            ws.close()
    return Runs(found, stopped, device.verdict(), device.races())


def _bits(results: Sequence[Any]) -> Bits:
    return tuple(
        (tuple(one.shape), str(one.dtype), one.reshape(-1).view(torch.uint8).numpy().tobytes()) for one in results
    )
