"""Requests in, tokens out: continuous batching with chunked prefill on one model."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import count

import attrs

from dsv4.cache.errors import CacheFull
from dsv4.errors import NoRoom, RequestError
from dsv4.model.context import Context
from dsv4.scheduler import Request, Rows, Scheduler
from dsv4.serve.drafting import Acceptance, guess
from dsv4.serve.errors import StepError
from dsv4.serve.generation import Finish, Generation
from dsv4.serve.model import Model
from dsv4.serve.sampling import Sampling
from dsv4.serve.turn import Turn, advance, turns


@attrs.frozen
class Delivery:
    """Tokens that one step gave one request."""

    generation: Generation
    tokens: tuple[int, ...]


class Server:
    """Serves requests, one step at a time, in the thread that calls it.

    In float32 a request's tokens do not depend on the requests beside it. In bfloat16, or with packed caches, a step of
    another shape rounds differently: whether others run beside it, prompts come in other chunks or tokens are guessed
    may then change its tokens.

    Parameters
    ----------
    model
        What a step runs on. Its limits are the server's.

    Attributes
    ----------
    acceptance
        How many guesses of the draft model were right.
    """

    def __init__(self, model: Model) -> None:
        engine = model.engine
        self.model = model
        self.acceptance = Acceptance()
        self._live: dict[int, Generation] = {}
        self._ids = count()
        limits = engine.max_num_batched_tokens, engine.max_num_seqs, engine.max_model_len
        self._scheduler = Scheduler(*limits, room=self)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._live)

    @property
    def evictions(self) -> int:
        """How often a request gave its blocks to an older one and started again."""
        return self._scheduler.evictions

    def submit(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Generation:
        """Queue a request.

        Raises
        ------
        RequestError
            The prompt is empty, an id is outside the vocabulary, or the request could not run even alone: its context
            is above the engine's, or the caches have too few blocks. Nothing was taken; other requests do not notice.
        """
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise RequestError(f"sampling={sampling!r}", "pass a dsv4.serve.sampling.Sampling")
        engine, vocabulary = self.model.engine, self.model.vocabulary
        context = Context(prompt, vocabulary, engine.max_model_len)
        for token in sampling.stop_tokens:
            if not 0 <= token < vocabulary:
                raise RequestError(
                    f"stop token {token} is outside the vocabulary of {vocabulary}",
                    f"ids are integers from 0 to {vocabulary - 1}",
                    token=token,
                )
        request = Request(next(self._ids), len(prompt), sampling.max_new_tokens)
        self._scheduler.add(request)
        try:
            self.model.check_fits(len(prompt) + sampling.max_new_tokens)
        except RequestError:
            self._scheduler.cancel(request.id)
            raise
        generation = self._live[request.id] = Generation(request.id, sampling, context, len(prompt))
        return generation

    def cancel(self, generation: Generation) -> bool:
        """End a request and give its blocks back; False when it had ended already.

        Raises `RequestError` for a request of another server.
        """
        self._check_own(generation)
        if generation.finish is not None:
            return False
        self._end(generation, Finish.CANCELLED)
        return True

    def _check_own(self, generation: Generation) -> None:
        """Each server numbers its requests from 0, so that one of another's would be mistaken for its own."""
        if generation.finish is None and self._live.get(generation.id) is not generation:
            raise RequestError(
                f"request {generation.id} runs in another server", "ask the server that it was submitted to"
            )

    def close(self) -> None:
        """Cancel every request. Twice is no error."""
        for generation in list(self._live.values()):
            self.cancel(generation)

    def stream(self, generation: Generation) -> Generator[int, None, None]:
        """A request's tokens, those it has first; steps are run, for all requests, until there is another.

        A reader that stops early cancels the request, whose blocks come back: by ``close()`` of the iterator, by an
        error in its loop, or by dropping the iterator. To read on later, keep the iterator; to let the request run on
        unread, call `step` instead. An iterator that was never read from cancels nothing.

        Raises
        ------
        StepError
            At the end, where a step of the request failed.
        NoRoom
            At the end, where the request found no blocks.
        RequestError
            It is a request of another server.
        """
        self._check_own(generation)
        given = 0
        try:
            while generation.finish is None or given < generation.generated:
                new = generation.context.tokens[generation.prompt_tokens + given :]
                given += len(new)
                yield from new
                if not new:
                    self.step()
        finally:
            self.cancel(generation)
        if generation.error is not None:
            raise generation.error

    def step(self) -> list[Delivery]:
        """Run one step of the model for every request that can take part; nothing when there is none.

        Where it fails, its requests end with a `StepError`, and their blocks are given back. Where no request finds
        blocks, because another server's requests hold them, the oldest one ends with `NoRoom`; the others go on.
        """
        try:
            step = self._scheduler.step()
        except NoRoom as error:
            self._end(self._live[error.request], Finish.ERROR, error)
            return []
        if step is None:
            return []
        try:
            return self._run(step.rows)
        except BaseException as error:
            failed = _failed(error)
            for one in step.rows:
                if one.request in self._live:
                    self._end(self._live[one.request], Finish.ERROR, failed)
            if not isinstance(error, Exception):
                raise
            return []

    # -- the scheduler's room --------------------------------------------------------------------------------
    def take(self, rows: Rows) -> bool:
        """Blocks for a request's rows; see `dsv4.scheduler.Room`."""
        try:
            self.model.take(rows, self._live[rows.request].context)
        except CacheFull:
            return False
        return True

    def free(self, request: int) -> None:
        """Evict a request; see `dsv4.scheduler.Room`."""
        generation = self._live[request]
        generation.context.free()
        generation.drafts.clear()

    # -- one step ----------------------------------------------------------------------------------------------
    def _run(self, rows: tuple[Rows, ...]) -> list[Delivery]:
        step = turns(rows, self._live)
        outcome = advance(self.model, step)
        for turn in step:
            self._settle(turn)
        going = [turn for turn in step if turn.generation.finish is None]
        if self.model.drafts and going:
            guess(self.model, going, outcome.residual)
        for turn in going:
            self._scheduler.draft(turn.generation.id, len(turn.generation.drafts))
            turn.generation.context.trim(turn.certain.end)
        return [Delivery(turn.generation, tuple(turn.tokens)) for turn in step if turn.tokens]

    def _settle(self, turn: Turn) -> None:
        """What a turn's tokens mean for its request."""
        generation = turn.generation
        if turn.guesses:
            self.acceptance.add(turn)
            self._scheduler.verified(generation.id, turn.certain.count)
        finish = generation.ended_by
        if finish:
            self._end(generation, finish)

    def _end(self, generation: Generation, finish: Finish, error: StepError | NoRoom | None = None) -> None:
        if generation.id in self._scheduler:
            self._scheduler.cancel(generation.id)
        generation.context.free()
        generation.drafts.clear()
        generation.finish, generation.error = finish, error
        del self._live[generation.id]


def _failed(cause: BaseException) -> StepError:
    """What a step's requests end with."""
    if isinstance(cause, StepError):
        return cause
    text = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    failed = StepError(f"a step of the model failed: {text}", "see the cause; submit the request again")
    failed.__cause__ = cause
    return failed
