"""Measure one cell: a judged replay for bytes, fences, calls and races, and real numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from workspace.errors import WorkspaceError
from workspace.sweep.devices import JudgedDevice, Sampler
from workspace.sweep.execute import execute
from workspace.sweep.plan import Cell, Replay
from workspace.sweep.protocol import ProtocolError
from workspace.sweep.result import Bytes, Judgement, Refused, Result, Sample
from workspace.sweep.session import prepare, session_of, steps_of
from workspace.sweep.setup import workspace_of
from workspace.sweep.workload import Session, Step

DETAIL = 120


def measure(replay: Replay, cell: Cell, allow_unsafe: bool, sampled: bool) -> Result | Refused:
    """All measurements of a cell but for its host time, or the typed error by which it was refused.

    Parameters
    ----------
    allow_unsafe
        Consent to a strategy that does not keep scratch intact; the memory is virtual.
    sampled
        Whether to collect the bytes over time (several times slower).
    """
    try:
        with torch.no_grad():
            session = session_of(replay)
            steps = steps_of(session, replay)
            result = _judged(session, replay, cell, allow_unsafe, sampled, steps)
            numbers = execute(replay, cell, allow_unsafe) if replay.schedules else None
            return attrs.evolve(result, numbers=numbers)
    except ProtocolError:
        raise  # of every cell alike
    except WorkspaceError as error:
        return Refused(cell, error.problem, error.remedy)
    except Exception as error:
        error.add_note(f"in the sweep's cell: {cell}")
        raise


def _judged(
    session: Session, replay: Replay, cell: Cell, allow_unsafe: bool, sampled: bool, steps: Sequence[Step]
) -> Result:
    """All but real numbers."""
    device = JudgedDevice(replay.seed)
    ws = workspace_of(cell, device, allow_unsafe, statistics=True)
    runner = prepare(session, ws, replay, cell)
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
        host_us=0.0,
        judgement=_judge(device),
        envelope=envelope,
        detail=detail,
    )
    ws.close()
    return result


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
