"""Cells of the matrix strategy x run mode x aux streams x micro-batches, run under a schedule."""

from __future__ import annotations

from collections.abc import Iterable
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
Setting = tuple[str, bool, int]
"""Run mode, aux streams, micro-batches."""

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


def runs(strategy: str, setting: Setting, schedules: Iterable[Any], *, draft: bool = False) -> list[Ran]:
    """Runs on one device, one after the other; a schedule may be a seed. An operator that fails ends them."""
    mode, aux_streams, micro_batches = setting
    device = simulated.Device(memory="host", execution="deferred")
    found: list[list[Any]] = []
    with torch.no_grad(), device:
        unsafe = strategy not in SAFE
        ws = workspace.create(strategy, device=device, micro_batches=micro_batches, allow_unsafe=unsafe)
        program = execution(draft).prepare(ws, mode, aux_streams, micro_batches)
        try:
            for one in schedules:
                device.queue.schedule = simulated.Random(one) if isinstance(one, int) else one
                found.append([tensor.numpy() for tensor in program.run()])
        except DriverError:
            found.append([])
    return [Ran(numbers, device.verdict(), str(device.races()[:1])) for numbers in found]


@cache
def reference(setting: Setting, draft: bool = False) -> Ran:
    """`caching`, each operator run in the order of the program."""
    return runs("caching", setting, [simulated.InOrder()], draft=draft)[0]
