"""Continuous batching with chunked prefill: requests in, steps out.

The order is vLLM's default one: every request that generates gets its token first, then prompts in order of
arrival, each as far as the token budget goes. There is no preemption: a running request keeps its place until
it is finished or cancelled.
"""

from __future__ import annotations

from collections import deque

import attrs

from dsv4.errors import RequestError


@attrs.frozen
class Request:
    """A request as it arrives.

    Attributes
    ----------
    id
        Unique among the requests of one scheduler.
    prompt_tokens
        Length of the prompt, 1 or more.
    new_tokens
        Tokens to generate at most, 1 or more. The last one is returned but never fed back.
    arrival
        Seconds since the start of the trace.
    """

    id: int
    prompt_tokens: int
    new_tokens: int
    arrival: float = 0.0


@attrs.frozen
class Rows:
    """One request's tokens in one step: positions ``start`` to ``start + count - 1``.

    Attributes
    ----------
    prefill
        Prompt tokens, of which a step may take a part; otherwise one generated token is fed back.
    samples
        Whether the last of them yields the request's next token.
    """

    request: int
    start: int
    count: int
    prefill: bool
    samples: bool

    @property
    def end(self) -> int:
        """Context length after the step."""
        return self.start + self.count


@attrs.frozen
class Step:
    """Tokens of one forward pass; decode rows come first, each kind in order of arrival.

    Attributes
    ----------
    index
        Position among the steps of its scheduler, from 0.
    rows
        One entry for each request that takes part.
    """

    index: int
    rows: tuple[Rows, ...]
    tokens: int
    prefill_tokens: int

    @property
    def decode_tokens(self) -> int:
        """Rows of requests that generate, one token each."""
        return self.tokens - self.prefill_tokens

    @property
    def requests(self) -> int:
        """Requests that take part."""
        return len(self.rows)


@attrs.define(eq=False)
class _Running:
    request: Request
    computed: int = 0

    @property
    def prompt_left(self) -> int:
        return self.request.prompt_tokens - self.computed

    @property
    def last(self) -> int:
        """Tokens to compute in all: the prompt, and each generated token but the last."""
        return self.request.prompt_tokens + self.request.new_tokens - 1


class Scheduler:
    """Turns requests into steps.

    Parameters
    ----------
    max_num_batched_tokens
        Token budget of a step; at least `max_num_seqs`, so that every running request can get a token.
    max_num_seqs
        Requests that run at the same time.
    max_model_len
        Longest context, prompt and generated tokens together.

    Raises
    ------
    RequestError
        A limit is not a positive integer, or the budget is below `max_num_seqs`.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> None:
        self.max_num_batched_tokens = _positive("max_num_batched_tokens", max_num_batched_tokens)
        self.max_num_seqs = _positive("max_num_seqs", max_num_seqs)
        self.max_model_len = _positive("max_model_len", max_model_len)
        if max_num_batched_tokens < max_num_seqs:
            raise RequestError(
                f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}",
                "a step needs room for a token of each running request: raise the first or lower the second",
            )
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._known: set[int] = set()
        self._index = 0

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._known)

    def add(self, request: Request) -> None:
        """Queue a request behind the others. Raises `RequestError`; the other requests are not affected."""
        for name in ("prompt_tokens", "new_tokens"):
            _positive(f"request {request.id}: {name}", getattr(request, name))
        length = request.prompt_tokens + request.new_tokens
        if length > self.max_model_len:
            raise RequestError(
                f"request {request.id} needs a context of {length} tokens, above max_model_len={self.max_model_len}",
                "shorten the prompt, ask for fewer tokens, or raise max_model_len",
                request=request.id,
            )
        if request.id in self._known:
            raise RequestError(f"request {request.id} is queued already", "give each request its own id")
        self._known.add(request.id)
        self._waiting.append(request)

    def cancel(self, request: int) -> None:
        """Forget a waiting or running request, e.g. at a stop token. Raises `RequestError` for any other."""
        if request not in self._known:
            raise RequestError(f"request {request} is not queued", "it is finished, cancelled, or was never added")
        self._known.remove(request)
        if self._running.pop(request, None) is None:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.id != request)

    def step(self) -> Step | None:
        """The next step; None when nothing waits or runs. Its tokens count as computed from here on."""
        rows = [
            Rows(running.request.id, running.computed, 1, False, True)
            for running in self._running.values()
            if running.prompt_left <= 0
        ]
        decoded = len(rows)
        prefilled = self._fill(rows)
        if not rows:
            return None
        self._advance(rows)
        step = Step(self._index, tuple(rows), decoded + prefilled, prefilled)
        self._index += 1
        return step

    def _fill(self, rows: list[Rows]) -> int:
        """Append chunks of prompts while the budget lasts; returns the tokens they take."""
        left = budget = self.max_num_batched_tokens - len(rows)
        started = [running for running in self._running.values() if running.prompt_left > 0]
        for running in started:
            left -= self._chunk(running, left, rows)
        while left and self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting.popleft()
            self._running[request.id] = running = _Running(request)
            left -= self._chunk(running, left, rows)
        return budget - left

    def _chunk(self, running: _Running, left: int, rows: list[Rows]) -> int:
        count = min(running.prompt_left, left)
        if count:
            rows.append(Rows(running.request.id, running.computed, count, True, count == running.prompt_left))
        return count

    def _advance(self, rows: list[Rows]) -> None:
        for one in rows:
            running = self._running[one.request]
            running.computed += one.count
            if running.computed >= running.last:
                del self._running[one.request]
                self._known.remove(one.request)


def _positive(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise RequestError(f"{name}={value!r} is not a positive integer", "pass an int of 1 or more")
    return value
