"""Corruption as evidence: does any legal schedule make some operator write other bytes than the serial run?

The judge is the proof and this is the demonstration: a race may leave no trace on the schedules that were tried. Every
operator's output is compared, not the program's result, which may not depend on what was corrupted.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import attrs
import torch

from workspace.simulated.call import Call
from workspace.simulated.device import Device
from workspace.simulated.schedule import InOrder, Random, Schedule, StreamFirst

Program = Callable[[Device], object]


@attrs.frozen
class Divergence:
    """The first operator, in order of enqueue, whose output differs from the serial run's.

    Attributes
    ----------
    ordinal
        Its place in the order of enqueue, from 0.
    label
        The operator.
    replay
        For a captured operator, which replay (from 0).
    schedule
        The schedule that shows it.
    """

    ordinal: int
    label: str
    replay: int
    schedule: str

    def __str__(self) -> str:
        return f"operator {self.ordinal} ({self.label}, run {self.replay}) differs under {self.schedule}"


class Witness:
    """Checksums of what each operator of a run wrote, by ordinal and replay."""

    def __init__(self) -> None:
        self.prints: dict[tuple[int, int], tuple[str, int]] = {}
        self._runs: dict[int, int] = {}

    def __call__(self, call: Call) -> None:
        """Take the checksum of an operator's outputs, right after it ran."""
        replay = self._runs.get(call.ordinal, 0)
        self._runs[call.ordinal] = replay + 1
        self.prints[(call.ordinal, replay)] = call.label, checksum(call.written)


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of the elements' bytes."""
    value = 0
    for tensor in tensors:
        dense = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
        value = zlib.crc32(dense.view(torch.uint8).numpy().data, value)
    return value


def observe(program: Program, schedule: Schedule, error: type[Exception] | None = None) -> tuple[Device, Witness]:
    """Run a program on a new device under a schedule, generator seeded with 0.

    Parameters
    ----------
    program
        Called with the entered device. It must enqueue the same operators each time, in one thread.
    schedule
        Of the device.
    error
        A type the program may end with; what ran before is kept.
    """
    device = Device(memory="host", execution="deferred", schedule=schedule)
    witness = Witness()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with device:
                assert device.executor is not None
                device.executor.witness = witness
                program(device)
        except Exception as raised:
            if error is None or not isinstance(raised, error):
                raise
    return device, witness


def schedules(streams: Iterable[int], seeds: Iterable[int]) -> list[tuple[str, Schedule]]:
    """One stream first, for each; one stream last, for each; then seeded random ones."""
    keys = list(streams)
    first: list[tuple[str, Schedule]] = [(f"stream {key} first", StreamFirst(key)) for key in keys]
    last: list[tuple[str, Schedule]] = [(f"stream {key} last", StreamFirst(key, last=True)) for key in keys]
    return first + last + [(f"seed {seed}", Random(seed)) for seed in seeds]


def compare(program: Program, seeds: Iterable[int] = range(8)) -> Divergence | None:
    """Look for a schedule that makes a program compute something else than it does serially.

    Parameters
    ----------
    program
        See `observe`.
    seeds
        Of the random schedules, tried after the directed ones.

    Returns
    -------
    divergence
        The first operator that differs, under the first schedule that shows one; None if none did.
    """
    device, serial = observe(program, InOrder())
    for name, schedule in schedules(list(device.streams), seeds):
        _, other = observe(program, schedule, error=Exception)
        for key in sorted(serial.prints.keys() | other.prints.keys()):
            if serial.prints.get(key) != other.prints.get(key):
                label, _ = serial.prints.get(key) or other.prints[key]
                return Divergence(key[0], label, key[1], name)
    return None
