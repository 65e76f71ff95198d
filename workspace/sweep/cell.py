"""Measure one cell: a timed replay for the host cost, a judged one for bytes, fences, calls and races, real numbers.

The host cost of a step is the thread's CPU time of ``Runner.run(step)``: the model's Python, the framework
(acquire, release, forks, fences, graphs), the simulated device's stand-ins for launch, record and wait, and a
``torch.empty`` on the CPU for each allocation. It leaves out the operations themselves, the access log and
garbage collection. It is not the time of the same step with CUDA: compare strategies by the ratio in one run.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from functools import cache
from typing import Any

import attrs
import torch

from workspace.errors import WorkspaceError
from workspace.sweep.devices import JudgedDevice, Sampler, TimedDevice
from workspace.sweep.execute import execute
from workspace.sweep.plan import Cell, Replay
from workspace.sweep.result import Bytes, Judgement, Refused, Result, Sample
from workspace.sweep.session import open_session
from workspace.sweep.setup import workspace_of

REPEATS = 2
DETAIL = 120

session_of = cache(open_session)
"""The session of a replay, opened once in each process."""


def measure(replay: Replay, cell: Cell, allow_unsafe: bool, sampled: bool) -> Result | Refused:
    """All measurements of a cell, or the typed error by which it was refused.

    Parameters
    ----------
    allow_unsafe
        Consent to a strategy that does not keep scratch intact; the memory is virtual.
    sampled
        Whether to collect the bytes over time (several times slower).
    """
    try:
        with torch.no_grad():
            result = _measure(replay, cell, allow_unsafe, sampled)
            if replay.schedules:
                result = attrs.evolve(result, numbers=execute(replay, cell, allow_unsafe))
            return result
    except WorkspaceError as error:
        return Refused(cell, error.problem, error.remedy)
    except Exception as error:
        error.add_note(f"in the sweep's cell: {cell}")
        raise


def _measure(replay: Replay, cell: Cell, allow_unsafe: bool, sampled: bool) -> Result:
    session = session_of(replay)
    steps = list(session.steps(replay.steps))
    host_us = _timed(session, replay, cell, allow_unsafe, steps)
    device = JudgedDevice(replay.seed)
    ws = workspace_of(cell, device, allow_unsafe, statistics=True)
    runner = session.prepare(ws, cell.mode, cell.aux_streams, cell.micro_batches)
    calls, before = Counter(device.counters), _counters(ws)
    device.statistics.reset_peaks()
    envelope: tuple[Sample, ...] = ()
    detail: tuple[Sample, ...] = ()
    if sampled:
        fullest = max(steps, key=lambda step: step.tokens)
        sampler = Sampler(ws, fullest.index, DETAIL)
        for step in steps:
            sampler.run(runner, step)
        envelope, detail = tuple(sampler.envelope), tuple(sampler.detail)
    else:
        for step in steps:
            runner.run(step)
    calls, counters = Counter(device.counters) - calls, _counters(ws)
    counters.subtract(before)
    snapshot = ws.snapshot()
    runner.close()
    ws.synchronize()
    result = Result(
        cell=cell,
        steps=len(steps),
        tokens=sum(step.tokens for step in steps),
        bytes=Bytes(
            snapshot.peak_allocated,
            device.statistics.peak_reserved,
            snapshot.retired,
            {name: owner.peak for name, owner in snapshot.owners.items()},
        ),
        counters=dict(counters),
        driver_calls=dict(calls),
        host_us=host_us,
        judgement=_judge(device),
        envelope=envelope,
        detail=detail,
    )
    ws.close()
    return result


def _timed(session: Any, replay: Replay, cell: Cell, allow_unsafe: bool, steps: list[Any]) -> float:
    """Mean over the steps of the least host time of `REPEATS` replays, in us."""
    device = TimedDevice(memory="virtual", seed=replay.seed, log=False)
    ws = workspace_of(cell, device, allow_unsafe, statistics=False)
    runner = session.prepare(ws, cell.mode, cell.aux_streams, cell.micro_batches)
    least = [float("inf")] * len(steps)
    gc.collect()
    gc.disable()
    try:
        for _ in range(REPEATS):
            for index, step in enumerate(steps):
                began = time.thread_time_ns()
                runner.run(step)
                least[index] = min(least[index], (time.thread_time_ns() - began) / 1000)
    finally:
        gc.enable()
    runner.close()
    ws.close()
    return sum(least) / len(least)


def _counters(ws: Any) -> Counter[str]:
    snapshot = ws.snapshot()
    acquires = sum(owner.acquires for owner in snapshot.owners.values())
    counted = {name: getattr(snapshot, name) for name in ("fences", "elided", "growths")}
    return Counter(acquires=acquires, **counted)


def _judge(device: JudgedDevice) -> Judgement:
    races = device.races()
    verdict = device.verdict()
    first = str(races[0]) if races else "; ".join(device.reasons())
    return Judgement(verdict, len(races), device.accesses, first)
