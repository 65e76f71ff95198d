"""Continuous batching with chunked prefill: requests in, steps out.

The order is vLLM's default one: every request that generates gets its token first, then prompts in order of
arrival, each as far as the token budget goes. A request that finds no room in the caches evicts those that started
after it, the last one first; an evicted one waits at the head of the queue, and its tokens so far are its prompt then.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import attrs

from dsv4.errors import NoRoom, RequestError


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
        Several tokens: a part of the prompt, or a generated token with drafts behind it that the step verifies.
        Otherwise one generated token is fed back.
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


class Room(Protocol):
    """What holds the running requests' blocks."""

    def take(self, rows: Rows) -> bool:
        """Hold what these rows need, for as long as the request runs; False when there is too little."""

    def free(self, request: int) -> None:
        """Give back all that a request holds: it is evicted, or could not start."""


class Unlimited:
    """Room for everything: a scheduler whose steps are not computed, or are known to fit."""

    def take(self, rows: Rows) -> bool:
        return True

    def free(self, request: int) -> None:
        pass


@attrs.define(eq=False)
class _Running:
    request: Request
    computed: int = 0
    drafts: int = 0

    @property
    def prompt_left(self) -> int:
        return self.request.prompt_tokens - self.computed

    @property
    def last(self) -> int:
        """Tokens to compute in all: the prompt, and each generated token but the last."""
        return self.request.prompt_tokens + self.request.new_tokens - 1

    @property
    def tokens(self) -> int:
        """Tokens of its context: the prompt and what was generated, of which the last one is not yet computed."""
        return max(self.request.prompt_tokens, self.computed + 1)


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
    room
        Says whether a step's rows find blocks. One request alone must always find them.

    Raises
    ------
    RequestError
        A limit is not a positive integer, or the budget is below `max_num_seqs`.

    Attributes
    ----------
    evictions
        How often a request had to give back its blocks and start again.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, room: Room | None = None
    ) -> None:
        self.max_num_batched_tokens = _positive("max_num_batched_tokens", max_num_batched_tokens)
        self.max_num_seqs = _positive("max_num_seqs", max_num_seqs)
        self.max_model_len = _positive("max_model_len", max_model_len)
        if max_num_batched_tokens < max_num_seqs:
            raise RequestError(
                f"max_num_batched_tokens={max_num_batched_tokens} is below max_num_seqs={max_num_seqs}",
                "a step needs room for a token of each running request: raise the first or lower the second",
            )
        self.evictions = 0
        self._room = room or Unlimited()
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._known: set[int] = set()
        self._index = 0

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._known)

    def __contains__(self, request: int) -> bool:
        """Whether a request waits or runs."""
        return request in self._known

    def add(self, request: Request) -> None:
        """Queue a request behind the others. Raises `RequestError`; the other requests are not affected."""
        for name in ("prompt_tokens", "new_tokens"):
            _positive(f"request {request.id}: {name}", getattr(request, name))
        length = request.prompt_tokens + request.new_tokens
        if length > self.max_model_len:
            raise RequestError(
                f"a context of {length} tokens is needed, above max_model_len={self.max_model_len}",
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

    def draft(self, request: int, count: int) -> None:
        """Up to so many guessed tokens may follow the running request's next one; `verified` must then be called.

        A step takes fewer where the budget or the request's own end leaves room for fewer.
        """
        self._running[request].drafts = count

    def verified(self, request: int, count: int) -> None:
        """So many rows of a request's step with drafts are computed from tokens that are certain."""
        self._computed(self._running[request], count)

    def step(self) -> Step | None:
        """The next step; None when nothing waits or runs. Its tokens count as computed from here on.

        Only rows with drafts wait for `verified`. Raises `NoRoom` when no request finds any; nothing was computed then,
        and a later call begins anew.
        """
        rows: dict[int, Rows] = {}
        evicted = self.evictions
        self._decode(rows)
        self._fill(rows)
        if self.evictions == evicted:
            self._start(rows)
        if not rows:
            if self._known:
                oldest = next(iter(self._running), None)
                if oldest is None:
                    oldest = self._waiting[0].id
                raise NoRoom(
                    f"request {oldest} finds no room for its next rows, nor does any behind it "
                    f"({self.unfinished} unfinished here)",
                    "give back the blocks that are held elsewhere, as by another server of the model, or cancel it",
                    request=oldest,
                )
            return None
        for one in rows.values():
            running = self._running[one.request]
            if one.start < running.request.prompt_tokens or one.count == 1:
                self._computed(running, one.count)
        # Stable: each kind stays in order of arrival.
        ordered = tuple(sorted(rows.values(), key=lambda one: one.prefill))
        prefilled = sum(one.count for one in ordered if one.prefill)
        step = Step(self._index, ordered, _tokens(rows), prefilled)
        self._index += 1
        return step

    def _decode(self, rows: dict[int, Rows]) -> None:
        """A row of every request that generates, and drafts behind it as far as the budget leaves room."""
        generating = [running for running in self._running.values() if running.prompt_left <= 0]
        spare = self.max_num_batched_tokens - len(generating)
        for running in generating:
            drafts = min(running.drafts, spare, running.last - running.computed - 1)
            if self._placed(Rows(running.request.id, running.computed, 1 + drafts, drafts > 0, True), rows):
                spare -= drafts

    def _fill(self, rows: dict[int, Rows]) -> None:
        """Chunks of the prompts that have begun."""
        for running in [one for one in self._running.values() if one.prompt_left > 0]:
            chunk = self._chunk(running, rows)
            if chunk.count:
                self._placed(chunk, rows)

    def _start(self, rows: dict[int, Rows]) -> None:
        """Begin prompts that wait, while the budget lasts and there are blocks for them."""
        while self._waiting and len(self._running) < self.max_num_seqs:
            running = _Running(self._waiting[0])
            chunk = self._chunk(running, rows)
            if not chunk.count:
                return
            if not self._room.take(chunk):
                self._room.free(chunk.request)
                return
            self._waiting.popleft()
            self._running[chunk.request] = running
            rows[chunk.request] = chunk

    def _chunk(self, running: _Running, rows: dict[int, Rows]) -> Rows:
        count = min(running.prompt_left, self.max_num_batched_tokens - _tokens(rows))
        return Rows(running.request.id, running.computed, count, True, count == running.prompt_left)

    def _placed(self, one: Rows, rows: dict[int, Rows]) -> bool:
        """Whether a running request's rows find room. What it evicts for that started after it."""
        if one.request not in self._running:  # evicted for one before it
            return False
        while not self._room.take(one):
            victim = next(reversed(self._running))
            if victim == one.request:
                return False  # nobody is behind it: it keeps what it holds and waits a turn
            rows.pop(victim, None)
            self._evict(victim)
        rows[one.request] = one
        return True

    def _evict(self, request: int) -> None:
        running = self._running.pop(request)
        self._room.free(request)
        left = running.last + 1 - running.tokens
        self._waiting.appendleft(attrs.evolve(running.request, prompt_tokens=running.tokens, new_tokens=left))
        self.evictions += 1

    def _computed(self, running: _Running, count: int) -> None:
        running.computed += count
        running.drafts = 0
        if running.computed >= running.last:
            del self._running[running.request.id]
            self._known.remove(running.request.id)


def _tokens(rows: dict[int, Rows]) -> int:
    return sum(one.count for one in rows.values())


def _positive(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise RequestError(f"{name}={value!r} is not a positive integer", "pass an int of 1 or more")
    return value
