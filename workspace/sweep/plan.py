"""What a sweep runs: one replay, and a cell for each combination to compare."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import attrs


@attrs.frozen
class Replay:
    """What all cells of a sweep share.

    Attributes
    ----------
    workload
        Name in the entry-point group ``workspace.workloads``, or ``module:Class``.
    model
        Preset or config file of the workload.
    trace
        Request trace, or None for the workload's generated one.
    driver
        ``"simulated"`` or ``"cuda"``.
    steps
        Steps of each cell, or None for the session's default.
    seed
        Of the generated trace and of the simulated device.
    schedules
        Schedules under which each cell also computes real numbers; 0: none.
    """

    workload: str
    model: str
    trace: Path | None
    driver: str
    steps: int | None
    seed: int
    schedules: int = 0


@attrs.frozen
class Cell:
    """One combination: a strategy, a run mode, the micro-batches of a step, side streams or none."""

    strategy: str
    mode: str
    micro_batches: int
    aux_streams: bool

    @property
    def setting(self) -> tuple[str, int, bool]:
        """What two cells must share to be compared: all but the strategy."""
        return self.mode, self.micro_batches, self.aux_streams

    def __str__(self) -> str:
        side = "side streams" if self.aux_streams else "no side streams"
        return f"{self.strategy}, {self.mode}, {self.micro_batches} micro-batch(es), {side}"


def cells(
    strategies: Iterable[str], modes: Iterable[str], micro_batches: Iterable[int], aux_streams: Iterable[bool]
) -> list[Cell]:
    """Every combination; those to be compared with each other are neighbours, so that they run together."""
    combinations = product(modes, micro_batches, aux_streams, strategies)
    return [Cell(strategy, mode, parts, aux) for mode, parts, aux, strategy in combinations]
