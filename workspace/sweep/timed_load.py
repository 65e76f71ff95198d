"""A request trace as load on a GPU: every strategy runs its steps, one after the other in turn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import torch

from workspace.config import WorkspaceConfig
from workspace.errors import WorkspaceError
from workspace.sweep.timed import Clock, Sample, Setting, Timing, close, collected, opened_on, sample, with_samples


def measure_load(
    model: Any, setting: Setting, safe: Mapping[str, bool], clock: Clock, config: WorkspaceConfig
) -> list[Timing]:
    """Timings of every strategy over the trace's steps, which all have run before: graphs are captured then.

    Parameters
    ----------
    model, safe, config
        As of `workspace.sweep.timed.measure`.
    """
    found: dict[str, Timing] = {}
    opened: dict[str, tuple[Any, Any]] = {}
    with torch.no_grad():
        try:
            for name in safe:
                before = clock.allocated()
                try:
                    own = attrs.evolve(config, strategy=name, allow_unsafe=not safe[name])
                    opened[name] = opened_on(model, setting, own, clock, statistics=False)
                    found[name] = Timing(name, peak=clock.allocated() - before)
                except WorkspaceError as error:
                    found[name] = Timing(name, problem=error.problem)
            found |= {name: _counted(found[name], *opened[name], peak) for name, peak in _peaks(opened, clock).items()}
            found |= _samples(found, opened, clock)
        finally:
            for ws, loaded in opened.values():
                close(ws, loaded, clock)
    return list(found.values())


def _peaks(opened: Mapping[str, tuple[Any, Any]], clock: Clock) -> dict[str, int]:
    """Most bytes that a step of each strategy allocates, beside what is held before the first."""
    most = dict.fromkeys(opened, 0)
    first = {name: ws.snapshot().reserved for name, (ws, _) in opened.items()}
    for place in range(max((one.steps for _, one in opened.values()), default=0)):
        for name, (ws, loaded) in opened.items():
            grown = ws.snapshot().reserved - first[name]
            clock.idle()
            before = clock.allocated()
            clock.peak(reset=True)
            loaded.run(place)
            clock.idle()
            most[name] = max(most[name], grown + clock.peak() - before)
    return most


def _counted(timing: Timing, ws: Any, loaded: Any, peak: int) -> Timing:
    return attrs.evolve(timing, peak=timing.peak + peak, reserved=ws.snapshot().reserved)


def _samples(found: Mapping[str, Timing], opened: Mapping[str, tuple[Any, Any]], clock: Clock) -> dict[str, Timing]:
    taken: dict[str, list[Sample]] = {name: [] for name in opened}
    before = {name: ws.snapshot() for name, (ws, _) in opened.items()}
    calls = dict.fromkeys(opened, 0)
    order, shuffler = list(opened), random.Random(0)
    with collected():
        for place in range(max((one.steps for _, one in opened.values()), default=0)):
            shuffler.shuffle(order)
            for name in order:
                began = clock.allocations()
                taken[name].append(sample(partial(opened[name][1].run, place), clock))
                calls[name] += clock.allocations() - began
    timings = {}
    for name, (ws, loaded) in opened.items():
        last = ws.snapshot()
        timing = attrs.evolve(
            found[name],
            first_token_us=tuple(
                round(sum(step for step, _, _ in taken[name][start : end + 1]), 1) for start, end in loaded.first_tokens
            ),
            allocator_calls=calls[name],
            fences=last.fences - before[name].fences,
            elided=last.elided - before[name].elided,
        )
        timings[name] = with_samples(timing, taken[name][loaded.skipped :])
    return timings
