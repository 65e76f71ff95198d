"""Host cost of deferring an operator, and of running it, against eager execution and an empty dispatch mode.

Bodies take turns in one process; figures are per operator call. A call that makes a new tensor is two nodes, its poison
and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import thread_time_ns
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.figure import Figure
from workspace import simulated

BATCHES, ROUNDS, WARM_UP = 15, 200, 2
OPERATORS = 5
"""Operator calls a round makes; its view is free of charge."""


def figures() -> list[Figure]:
    """All figures of this benchmark."""
    with _one_thread(), torch.no_grad():
        x, w = torch.randn(8, 8), torch.randn(8, 8)
        bodies = {
            "eager": lambda: _split(lambda: _rounds(x, w), None),
            "empty mode": lambda: _under(Null(), lambda: _split(lambda: _rounds(x, w), None)),
            "no log": _deferred(x, w, log=False),
            "log": _deferred(x, w),
            "log and sites": _deferred(x, w, sites=True),
        }
        times = _interleaved(bodies)
    eager = [sum(pair) for pair in times["eager"]]
    found = [Figure(f"{name}: an operator", median(map(sum, times[name])), "us") for name in ("eager", "empty mode")]
    for name in ("no log", "log", "log and sites"):
        enqueue, execute = zip(*times[name], strict=True)
        found += [
            Figure(f"deferred, {name}: enqueue", median(enqueue), "us"),
            Figure(f"deferred, {name}: execute", median(execute), "us"),
            Figure(f"deferred, {name}: both, over eager", _ratio(list(map(sum, times[name])), eager), "x"),
        ]
    return found


class Null(TorchDispatchMode):
    """A mode that only calls the operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _rounds(x: torch.Tensor, w: torch.Tensor) -> None:
    for _ in range(ROUNDS):
        y = x + w
        z = torch.relu(y)
        z.mul_(2)
        torch.mm(z, w, out=y)
        (z.view(64) * 2).view(8, 8)


def _deferred(x: torch.Tensor, w: torch.Tensor, **settings: bool) -> Callable[[], tuple[float, float]]:
    device = simulated.Device(memory="host", execution="deferred", schedule=simulated.InOrder(), **settings)

    def body() -> tuple[float, float]:
        with device:
            return _split(lambda: _rounds(x, w), device.synchronize)

    return body


def _split(enqueue: Callable[[], object], execute: Callable[[], object] | None) -> tuple[float, float]:
    """CPU time per operator of both parts, in us."""
    began = thread_time_ns()
    enqueue()
    between = thread_time_ns()
    if execute is not None:
        execute()
    count = ROUNDS * OPERATORS * 1000
    return (between - began) / count, (thread_time_ns() - between) / count if execute is not None else 0.0


def _under(mode: TorchDispatchMode, body: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    with mode:
        return body()


def _interleaved(bodies: dict[str, Callable[[], tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    for _ in range(WARM_UP):
        for body in bodies.values():
            body()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in bodies}
    for _ in range(BATCHES):
        for name, body in bodies.items():
            times[name].append(body())
    return times


def _ratio(over: list[float], under: list[float]) -> float:
    return median(a / b for a, b in zip(over, under, strict=True))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    for figure in figures():
        print(f"{figure.name:50} {figure.value:8.2f} {figure.unit}")
