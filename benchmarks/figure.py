"""One measured figure and the target it is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time_ns

import attrs


@attrs.frozen
class Figure:
    """A value of one run.

    Attributes
    ----------
    name
        What was measured, with the strategy.
    value
        In `unit`; ratios are of the same run.
    limit
        The target: the value may not exceed it. None where there is no target.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def met(self) -> bool:
        """Whether the target is met; true without one."""
        return self.limit is None or self.value <= self.limit


def interleaved_us(bodies: Sequence[Callable[[], object]], batches: int, calls: int) -> list[list[float]]:
    """CPU time of one call of each body in us, by batch; the bodies take turns in every batch.

    Each body makes `calls` calls. Drift of the machine hits all bodies of a batch alike, so ratios are taken
    within a batch.
    """
    for body in bodies:
        body()
    times: list[list[float]] = []
    for _ in range(batches):
        batch = []
        for body in bodies:
            began = thread_time_ns()
            body()
            batch.append((thread_time_ns() - began) / 1000 / calls)
        times.append(batch)
    return times


def median_ratio(times: Sequence[Sequence[float]], over: int, under: int) -> float:
    """Median over the batches of one body's time over another's."""
    return median(batch[over] / batch[under] for batch in times)


def median_of(times: Sequence[Sequence[float]], body: int) -> float:
    """Median time of a body."""
    return median(batch[body] for batch in times)
