"""What a sweep runs: one replay, and a cell for each combination to compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import attrs

REFERENCE = "caching"
"""The strategy that results and times of the others in the same setting are compared with."""


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
class Extent:
    """How much a replay runs, in words that tell a short one from a long one.

    Attributes
    ----------
    steps
        Number of steps.
    fewest, most
        Tokens of the smallest and the largest step.
    prefills
        Steps with prompt tokens.
    """

    steps: int
    fewest: int
    most: int
    prefills: int

    @classmethod
    def of(cls, steps: Sequence[Any]) -> Extent:
        """That of some steps, one at least."""
        tokens = [step.tokens for step in steps]
        return cls(len(steps), min(tokens), max(tokens), sum(step.prefill_tokens > 0 for step in steps))

    def __str__(self) -> str:
        sizes = f"{self.fewest:,}" if self.fewest == self.most else f"{self.fewest:,} to {self.most:,}"
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        return f"{steps} of {sizes} tokens, {self.prefills or 'none'} with a prefill"


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


def name_of(setting: tuple[str, int, bool]) -> str:
    """A setting as tables and pictures show it."""
    mode, parts, aux = setting
    return f"{mode} x{parts}" + ("" if aux else " serial")


def cells(
    strategies: Iterable[str], modes: Iterable[str], micro_batches: Iterable[int], aux_streams: Iterable[bool]
) -> list[Cell]:
    """Every combination; those to be compared with each other are neighbours, so that they run together."""
    combinations = product(modes, micro_batches, aux_streams, strategies)
    return [Cell(strategy, mode, parts, aux) for mode, parts, aux, strategy in combinations]
