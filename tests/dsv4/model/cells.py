"""Cells of the matrix strategy x run mode x aux streams x micro-batches, run under a schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import numpy as np
import torch

import workspace
from dsv4.model.execution import Execution
from workspace import simulated
from workspace.errors import DriverError

SAFE = ("caching", "event_fenced", "per_stream")
MODES = ("eager", "full", "wide", "narrow", "overflow")


@attrs.frozen
class Ran:
    """Generated tokens and logits of a run, on the host, and what the clock check says of it.

    Attributes
    ----------
    numbers
        Tokens, then the logits of each step; none where an operator failed on what it was given.
    """

    numbers: list[Any]
    verdict: str
    race: str

    def equals(self, other: Ran) -> bool:
        """Bit for bit."""
        return len(self.numbers) == len(other.numbers) and all(
            one.tobytes() == two.tobytes() for one, two in zip(self.numbers, other.numbers, strict=True)
        )

    def distance(self, other: Ran) -> float:
        """Largest difference of a logit."""
        return max(float(np.abs(one - two).max()) for one, two in zip(self.numbers[1:], other.numbers[1:], strict=True))


@cache
def execution(draft: bool = False) -> Execution:
    return Execution(draft=draft)


def run(strategy: str, mode: str, aux_streams: bool, micro_batches: int, schedule: Any, *, draft: bool = False) -> Ran:
    """One run on a device of its own; `schedule` is a seed, or a schedule."""
    chosen = simulated.Random(schedule) if isinstance(schedule, int) else schedule
    device = simulated.Device(memory="host", execution="deferred", schedule=chosen)
    with torch.no_grad(), device:
        unsafe = strategy not in SAFE
        ws = workspace.create(strategy, device=device, micro_batches=micro_batches, allow_unsafe=unsafe)
        try:
            numbers = [one.numpy() for one in execution(draft).run(ws, mode, aux_streams, micro_batches)]
        except DriverError:
            numbers = []
    return Ran(numbers, device.verdict(), str(device.races()[:1]))


@cache
def reference(mode: str, aux_streams: bool, micro_batches: int, draft: bool = False) -> Ran:
    """`caching`, each operator run in the order of the program."""
    return run("caching", mode, aux_streams, micro_batches, simulated.InOrder(), draft=draft)
