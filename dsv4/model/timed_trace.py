"""A request trace as the load of timed steps: those that a server would make of it, the same under every strategy."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import attrs

from dsv4.cache.caches import Caches
from dsv4.cache.groups import groups_of
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.precision import SERVED
from dsv4.model.runner import Runner
from dsv4.scheduler import Request, Scheduler, Step
from dsv4.trace import generate

ENGINE = Engine(max_num_batched_tokens=512, max_num_seqs=16, max_model_len=2048)
SHORTER = 4
"""The trace's prompts, generations and gaps are divided by this: the same load, in fewer steps."""

REQUESTS, SKIPPED, STEPS = 64, 8, 24
"""Of the trace; steps of it that are not timed, for the load to build up; steps that are."""


@attrs.frozen(eq=False)
class Load:
    """Steps of a trace.

    Attributes
    ----------
    first_tokens
        Of each request that has both among the steps: the step it waited for, and the one that gave its first token.
    """

    steps: tuple[Step, ...]
    requests: tuple[Request, ...]
    first_tokens: tuple[tuple[int, int], ...]


def load_of(seed: int) -> Load:
    """A generated trace, shortened; an assumed clock decides when requests join (see `Engine.step_seconds`)."""
    longest = ENGINE.max_model_len // 2
    requests = tuple(
        attrs.evolve(
            one,
            prompt_tokens=min(longest, -(-one.prompt_tokens // SHORTER)),
            new_tokens=min(longest, -(-one.new_tokens // SHORTER)),
            arrival=one.arrival / SHORTER,
        )
        for one in generate(seed, REQUESTS)
    )
    scheduler = Scheduler(ENGINE.max_num_batched_tokens, ENGINE.max_num_seqs, ENGINE.max_model_len)
    waiting, clock, steps = deque(requests), 0.0, list[Step]()
    joined: dict[int, int] = {}
    while len(steps) < SKIPPED + STEPS:
        while waiting and waiting[0].arrival <= clock:
            joined[waiting[0].id] = len(steps)
            scheduler.add(waiting.popleft())
        step = scheduler.step()
        if step is None:
            clock = waiting[0].arrival
            continue
        clock += ENGINE.step_seconds + ENGINE.token_seconds * step.tokens
        steps.append(step)
    return Load(tuple(steps), requests, tuple(_first_tokens(steps, joined)))


def _first_tokens(steps: Sequence[Step], joined: dict[int, int]) -> list[tuple[int, int]]:
    given: dict[int, int] = {}
    for place, step in enumerate(steps):
        for one in step.rows:
            if one.samples:
                given.setdefault(one.request, place)
    return [(start, given[request]) for request, start in joined.items() if start >= SKIPPED and request in given]


class Sessions:
    """A load's requests in caches that all strategies share: each runs a step before any runs the next."""

    def __init__(self, config: ModelConfig, load: Load, micro_batches: int, device: str) -> None:
        self.load = load
        draw = random.Random(0)
        self.contexts = {
            one.id: Context(
                [draw.randrange(config.vocab_size) for _ in range(one.prompt_tokens + one.new_tokens)],
                config.vocab_size,
                ENGINE.max_model_len,
            )
            for one in load.requests
        }
        blocks = {
            one.name: ENGINE.max_num_seqs * (-(-ENGINE.max_model_len // one.block_tokens)) for one in groups_of(config)
        }
        self.caches = [Caches(config, SERVED.storage, blocks, device=device) for _ in range(micro_batches)]
        self._over = [
            {one.request for one in step.rows} - {one.request for one in after.rows}
            for step, after in pairwise(load.steps)
        ]

    def run(self, runner: Runner, place: int) -> None:
        """Enqueue a step of the load; what ended before gives its blocks back."""
        for request in self._over[place - 1] if place else self.contexts:
            self.contexts[request].free()
        runner.forward(self.load.steps[place].rows, self.contexts)


class Loaded:
    """The steps of a load on one workspace; see `workspace.sweep.workload.Loaded`."""

    skipped = SKIPPED

    def __init__(self, sessions: Sessions, runner: Runner) -> None:
        self._sessions, self._runner = sessions, runner
        self.steps = len(sessions.load.steps)
        self.first_tokens = sessions.load.first_tokens

    def run(self, place: int) -> None:
        """Enqueue a step."""
        self._sessions.run(self._runner, place)

    def close(self) -> None:
        """Release the graphs."""
        self._runner.close()
