"""Driver calls of a fork and its join, and of the lease around them, counted on the simulated device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import workspace
from benchmarks.figure import Figure, interleaved_us, median_of
from workspace import simulated

POOLED = ("event_fenced", "per_stream")
BATCHES, CALLS, WARM_UP = 21, 1000, 100
SCRATCH = workspace.Layout("scratch", x=workspace.spec(1 << 20, dtype=torch.uint8))


def figures() -> list[Figure]:
    """All figures of this benchmark."""
    found = []
    with torch.inference_mode():
        for strategy in POOLED:
            found += _counted(strategy)
    return found


def _counted(strategy: str) -> list[Figure]:
    ws = workspace.create(strategy, device=simulated.Device(memory="host", log=False))
    aux = [ws.stream("aux0"), ws.stream("aux1")]
    late = ws.stream("late")
    bodies = (_fork, _lease_and_fork, _lease_fork_and_unjoined_use)
    for body in bodies:
        for _ in range(WARM_UP):
            body(ws, aux, late)
    bare, leased, unjoined = (_calls(ws, body, aux, late) for body in bodies)
    times = interleaved_us([_repeated(ws, body, aux, late) for body in bodies[:2]], BATCHES, CALLS)
    fences = unjoined - leased
    return [
        Figure(f"{strategy}: driver calls beyond the fork's own", (leased - bare).total(), "calls", 0),
        Figure(f"{strategy}: records of one unjoined use", fences["record"], "calls", 1),
        Figure(f"{strategy}: waits of one unjoined use", fences["wait"], "calls", 1),
        Figure(f"{strategy}: other calls of one unjoined use", (fences - _FENCE).total(), "calls", 0),
        Figure(f"{strategy}: fork of two streams and join", median_of(times, 0), "us"),
        Figure(f"{strategy}: the same with a lease around it", median_of(times, 1), "us"),
    ]


_FENCE = Counter(record=1, wait=1)


def _fork(ws: Any, aux: list[Any], late: Any) -> None:
    with ws.fork(*aux) as branch:
        for stream in aux:
            with branch(stream):
                pass


def _lease_and_fork(ws: Any, aux: list[Any], late: Any) -> None:
    with ws.lease(SCRATCH) as scratch:
        scratch.x  # noqa: B018  (an op's argument)
        _fork(ws, aux, late)


def _lease_fork_and_unjoined_use(ws: Any, aux: list[Any], late: Any) -> None:
    with ws.lease(SCRATCH) as scratch:
        _fork(ws, aux, late)
        ws.use(scratch, late)


def _calls(ws: Any, body: Any, aux: list[Any], late: Any) -> Counter[str]:
    """Driver calls of one round and of the next round's acquire, in the steady state."""
    body(ws, aux, late)
    before = Counter(ws.device.counters)
    body(ws, aux, late)
    return Counter(ws.device.counters) - before


def _repeated(ws: Any, body: Any, aux: list[Any], late: Any) -> Any:
    def run() -> None:
        for _ in range(CALLS):
            body(ws, aux, late)

    return run
