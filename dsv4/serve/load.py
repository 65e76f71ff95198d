"""A request trace as load: requests arrive on a clock, and the time of each token is kept."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import attrs

from dsv4.errors import RequestError
from dsv4.scheduler import Request
from dsv4.serve.generation import Generation
from dsv4.serve.sampling import Sampling
from dsv4.serve.server import Server


class Clock(Protocol):
    """Seconds that pass."""

    def now(self) -> float:
        """Seconds since some moment."""

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""


class HostClock:
    """The host's."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


@attrs.define(eq=False)
class Served:
    """What became of one request of a trace.

    Attributes
    ----------
    arrival
        Seconds after the start at which it was due.
    times
        Seconds after the start at which each of its tokens was there.
    generation
        None if it was refused.
    problem
        Why it was refused, or what failed; empty if it has all its tokens.
    """

    request: Request
    arrival: float
    times: list[float] = attrs.field(factory=list)
    generation: Generation | None = None
    problem: str = ""


def scaled(requests: Sequence[Request], longest: int) -> tuple[list[Request], float]:
    """Requests shortened alike, so that each fits a context of `longest` tokens, and the factor.

    A prompt and what is generated keep a token at least.
    """
    most = max(one.prompt_tokens + one.new_tokens for one in requests)
    factor = max(1.0, most / longest)
    return [
        attrs.evolve(
            one, prompt_tokens=max(1, int(one.prompt_tokens / factor)), new_tokens=max(1, int(one.new_tokens / factor))
        )
        for one in requests
    ], factor


def serve(
    server: Server, requests: Sequence[Request], *, speed_up: float = 1.0, seed: int = 0, clock: Clock | None = None
) -> tuple[list[Served], float]:
    """Serve a trace; what became of each request, in order of arrival, and the seconds it took.

    Prompts are drawn by `seed`. Tokens are chosen greedily, and none of them ends a generation early.

    Parameters
    ----------
    speed_up
        Arrivals are so many times closer together.
    clock
        Omitted: the host's.

    Raises
    ------
    RequestError
        The speed-up is no number above 0.
    """
    if not 0 < speed_up < float("inf"):
        raise RequestError(f"speed_up={speed_up!r} is no finite number above 0", "pass 1 for the trace's own arrivals")
    clock, draw = clock or HostClock(), random.Random(seed)
    served = [Served(one, one.arrival / speed_up) for one in requests]
    due, running = deque(served), dict[int, Served]()
    start = clock.now()
    while due or server.unfinished:
        now = clock.now() - start
        while due and due[0].arrival <= now:
            one = due.popleft()
            _submit(server, one, draw)
            if one.generation:
                running[one.generation.id] = one
        if not server.unfinished:
            if due:
                clock.wait(due[0].arrival - now)
            continue
        delivered = server.step()
        now = clock.now() - start
        for delivery in delivered:
            running[delivery.generation.id].times += [now] * len(delivery.tokens)
    for one in running.values():
        if one.generation and one.generation.error:
            one.problem = one.generation.error.problem
    return served, clock.now() - start


def _submit(server: Server, one: Served, draw: random.Random) -> None:
    prompt = [draw.randrange(server.model.vocabulary) for _ in range(one.request.prompt_tokens)]
    try:
        one.generation = server.submit(prompt, Sampling(max_new_tokens=one.request.new_tokens))
    except RequestError as error:  # the others are served
        one.problem = error.problem
