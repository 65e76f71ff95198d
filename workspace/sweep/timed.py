"""Steps on a GPU: the strategies of one setting take one step each in turn, and are timed and counted."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Protocol

import attrs
import torch

import workspace
from workspace.config import WorkspaceConfig
from workspace.errors import WorkspaceError

WARM_UP, LEAST_ROUNDS = 3, 5

LONGEST_S = 5.0
"""The rounds of a setting end after so many seconds, if there were `LEAST_ROUNDS`; warming up ends after a fifth."""

Sample = tuple[float, float, float]

TRACE = 0
"""Tokens of a setting whose steps are those of a request trace."""

BASELINE = "upstream"
"""What speed is compared with: returning forms and nothing tracked."""


@attrs.frozen
class Setting:
    """What strategies are compared in.

    Attributes
    ----------
    tokens
        Of a step; `TRACE`: the steps of a request trace.
    """

    mode: str
    micro_batches: int
    aux_streams: bool
    tokens: int

    def __str__(self) -> str:
        what = f"{self.tokens} tokens" if self.tokens else "trace"
        return f"{self.mode} x{self.micro_batches}{'' if self.aux_streams else ' serial'}, {what}"


@attrs.frozen
class Timing:
    """One strategy in one setting; us and bytes of one step.

    Attributes
    ----------
    step_us, host_us, device_us
        Samples by round (of a trace, by step): to the end of all work, until it is enqueued, and between events around
        it on the device.
    first_token_us
        Of a trace's requests: from the step at which each began to wait to its first token.
    allocator_calls, fences, elided
        Of one step; of a trace, of all that are timed.
    reserved, peak
        Held from the framework's allocator between steps; and the most that was allocated in a step, what is held and
        persistent buffers included.
    owners
        Most bytes on loan by owner.
    problem
        Why the strategy or the workload refused; empty where it did not.
    """

    strategy: str
    step_us: tuple[float, ...] = ()
    host_us: tuple[float, ...] = ()
    device_us: tuple[float, ...] = ()
    first_token_us: tuple[float, ...] = ()
    allocator_calls: int = 0
    fences: int = 0
    elided: int = 0
    reserved: int = 0
    peak: int = 0
    owners: Mapping[str, int] = attrs.field(factory=dict)
    problem: str = ""


class Clock(Protocol):
    """What is asked of the device beside the work."""

    device: str

    def idle(self) -> None:
        """Wait until nothing runs."""

    def begin(self) -> None:
        """Mark the device's time."""

    def elapsed_us(self) -> float:
        """Time of the device since the mark; waits for all work."""

    def allocations(self) -> int:
        """Calls of the framework's allocator so far."""

    def allocated(self) -> int:
        """Bytes allocated now."""

    def peak(self, reset: bool = False) -> int:
        """Most bytes allocated since the last reset."""


class CudaClock:
    """The current CUDA device's."""

    device = "cuda"

    def __init__(self) -> None:
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def idle(self) -> None:
        torch.cuda.synchronize()

    def begin(self) -> None:
        self._first.record()

    def elapsed_us(self) -> float:
        self._last.record()
        torch.cuda.synchronize()
        return 1000.0 * self._first.elapsed_time(self._last)

    def allocations(self) -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    def allocated(self) -> int:
        # What was recorded on other streams is taken back when the next tensor is asked for, not when they are done.
        torch.cuda.synchronize()
        torch.empty(1, device=self.device)
        return torch.cuda.memory_allocated()

    def peak(self, reset: bool = False) -> int:
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()


def measure(
    model: Any, setting: Setting, safe: Mapping[str, bool], rounds: int, clock: Clock, config: WorkspaceConfig
) -> list[Timing]:
    """Timings of every strategy in a setting.

    Parameters
    ----------
    model
        A `workspace.sweep.workload.Timed`.
    safe
        Whether each strategy claims to be safe; the others are created with the consent they ask for.
    config
        The settings but for those that the sweep sets itself.
    """
    found: dict[str, Timing] = {}
    opened: dict[str, tuple[Any, Any]] = {}
    with torch.no_grad():
        try:
            for name in safe:
                try:
                    own = attrs.evolve(config, strategy=name, allow_unsafe=not safe[name])
                    owners = _owners(model, setting, own, clock)
                    before = clock.allocated()
                    opened[name] = ws, runner = opened_on(model, setting, own, clock, statistics=False)
                    found[name] = _counted(name, ws, runner, before, owners, clock)
                except WorkspaceError as error:
                    opened.pop(name, None)
                    found[name] = Timing(name, problem=error.problem)
            samples = _in_turn({name: runner.run for name, (_, runner) in opened.items()}, rounds, clock)
        finally:
            for ws, runner in opened.values():
                close(ws, runner, clock)
    return [with_samples(one, samples.get(name, [])) for name, one in found.items()]


def with_samples(timing: Timing, rows: Sequence[Sample]) -> Timing:
    """A timing with the figures of its rounds; as it is without any."""
    if not rows:
        return timing
    step_us, host_us, device_us = (tuple(round(value, 1) for value in column) for column in zip(*rows, strict=True))
    return attrs.evolve(timing, step_us=step_us, host_us=host_us, device_us=device_us)


def opened_on(model: Any, setting: Setting, config: WorkspaceConfig, clock: Clock, statistics: bool) -> Any:
    config = attrs.evolve(config, micro_batches=setting.micro_batches, statistics=statistics)
    ws = workspace.create(device=clock.device, config=config)
    given = ws, setting.mode, setting.aux_streams, setting.micro_batches
    return ws, model.prepare(*given, setting.tokens) if setting.tokens else model.load(*given)


def close(ws: Any, runner: Any, clock: Clock) -> None:
    """Give everything back at once, so that the next one's bytes are its own."""
    runner.close()
    clock.idle()
    ws.synchronize()
    ws.close()


def _owners(model: Any, setting: Setting, config: WorkspaceConfig, clock: Clock) -> dict[str, int]:
    """Counted on a workspace of its own: counting takes the short ways of a lease away."""
    ws, runner = opened_on(model, setting, config, clock, statistics=True)
    runner.run()
    found = {owner: one.peak for owner, one in ws.snapshot().owners.items()}
    close(ws, runner, clock)
    return found


def _counted(name: str, ws: Any, runner: Any, before: int, owners: dict[str, int], clock: Clock) -> Timing:
    began = time.perf_counter()
    for _ in range(WARM_UP):
        runner.run()
        clock.idle()
        if time.perf_counter() - began > LONGEST_S / 5:
            break
    first, calls = ws.snapshot(), clock.allocations()
    clock.peak(reset=True)
    runner.run()
    clock.idle()
    last, peak = ws.snapshot(), clock.peak()
    return Timing(
        name,
        allocator_calls=clock.allocations() - calls,
        fences=last.fences - first.fences,
        elided=last.elided - first.elided,
        reserved=last.reserved,
        peak=peak - before,
        owners=owners,
    )


def _in_turn(steps: Mapping[str, Callable[[], object]], rounds: int, clock: Clock) -> dict[str, list[Sample]]:
    """Samples of each strategy by round, in an order that a seed shuffles."""
    taken: dict[str, list[Sample]] = {name: [] for name in steps}
    order, shuffler = list(steps), random.Random(0)
    with collected():
        began = time.perf_counter()
        for done in range(rounds):
            if done >= LEAST_ROUNDS and time.perf_counter() - began > LONGEST_S:
                break
            shuffler.shuffle(order)
            for name in order:
                taken[name].append(sample(steps[name], clock))
    return taken


@contextmanager
def collected() -> Iterator[None]:
    """Garbage is collected before, and not meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def sample(step: Callable[[], object], clock: Clock) -> Sample:
    """(step, host, device) us of a step that begins on an idle device."""
    clock.idle()
    clock.begin()
    began = time.perf_counter_ns()
    step()
    enqueued = time.perf_counter_ns()
    device_us = clock.elapsed_us()
    return (time.perf_counter_ns() - began) / 1e3, (enqueued - began) / 1e3, device_us


def ratio(over: Timing, under: Timing) -> tuple[float, float, float]:
    """Median of the paired ratio of step times, and its 95% interval by order statistics."""
    pairs = sorted(one / other for one, other in zip(over.step_us, under.step_us, strict=True))
    reach = 1.959964 * math.sqrt(len(pairs)) / 2
    low = max(0, math.floor(len(pairs) / 2 - reach) - 1)
    high = min(len(pairs) - 1, math.ceil(len(pairs) / 2 + reach))
    return median(pairs), pairs[low], pairs[high]
