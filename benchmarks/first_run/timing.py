"""Host time of statements, finely interleaved: on these hosts only ratios within one run mean anything."""

from __future__ import annotations

import random
import statistics
import timeit
from collections.abc import Callable
from typing import Any


def interleaved(
    statements: dict[str, str],
    scope: dict[str, Any],
    *,
    settle: Callable[[], None],
    rounds: int = 21,
    calls: int = 200,
) -> dict[str, dict[str, float]]:
    """Microseconds of one call of each statement.

    Every round times every statement once, in a new order. ``settle`` runs before each batch, untimed, so
    that no batch pays for what the one before it left on the device.

    Returns
    -------
    For each name the median, lower and upper quartile over the rounds, in us.
    """
    timers = {name: timeit.Timer(statement, globals=scope) for name, statement in statements.items()}
    for timer in timers.values():
        timer.timeit(calls)
        settle()
    taken: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    shuffler = random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            settle()
            taken[name].append(timers[name].timeit(calls) / calls * 1e6)
    return {name: _summary(values) for name, values in taken.items()}


def _summary(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median_us": round(middle, 3), "q1_us": round(low, 3), "q3_us": round(high, 3)}
