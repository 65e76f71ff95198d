"""One request's part in one step of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch

from dsv4.model.context import Context
from dsv4.model.decoder import Outcome
from dsv4.scheduler import Rows
from dsv4.serve.generation import Generation
from dsv4.serve.model import Model
from dsv4.serve.sampling import choose


@attrs.define(eq=False)
class Turn:
    """A request's rows in a step, and the tokens they give.

    Attributes
    ----------
    first
        Its first row among those of the step.
    guesses
        Tokens of its last rows that were guessed by the draft model.
    tokens
        New tokens, appended to its context.
    """

    generation: Generation
    rows: Rows
    first: int
    guesses: list[int]
    tokens: list[int] = attrs.field(factory=list)

    @property
    def sampled(self) -> range:
        """Rows of the step whose logits give tokens: that of the last certain token, and of each guess."""
        end = self.first + self.rows.count
        return range(end - 1 - len(self.guesses), end)

    @property
    def certain(self) -> Rows:
        """The rows without those of wrong guesses.

        What these left in the caches is never read: a row sees positions up to its own only, and the next step begins
        at the first wrong one and writes it anew, compressor states and compressed keys included.
        """
        return attrs.evolve(self.rows, count=len(self.tokens)) if self.guesses else self.rows

    def accept(self, logits: torch.Tensor) -> None:
        """Take tokens from logits [len(sampled), V], as far as the guesses are what would have been chosen."""
        generation = self.generation
        for row, guess in zip(logits, [*self.guesses, None], strict=True):
            token = choose(row, generation.sampling, generation.generated)
            generation.context.append([token])
            self.tokens.append(token)
            if token != guess or generation.ended_by:
                return


def turns(rows: Sequence[Rows], live: dict[int, Generation]) -> list[Turn]:
    """The turns of a step's rows."""
    found, first = [], 0
    for one in rows:
        generation = live[one.request]
        guessed = max(0, one.end - len(generation.context.tokens))
        found.append(Turn(generation, one, first, generation.drafts[:guessed]))
        first += one.count
    return found


def advance(model: Model, step: Sequence[Turn]) -> Outcome:
    """Run a step, and take up its tokens."""
    contexts = {turn.generation.id: turn.generation.context for turn in step}
    with restored(contexts.values()):
        for turn in step:
            turn.generation.context.append(turn.guesses)
        outcome = model.forward([turn.rows for turn in step], contexts)
    giving = [turn for turn in step if turn.rows.samples]
    if giving:
        logits = model.logits(outcome.hidden, [row for turn in giving for row in turn.sampled])
        for turn, own in zip(giving, logits.split([len(turn.sampled) for turn in giving]), strict=True):
            turn.accept(own)
    return outcome


@contextmanager
def restored(contexts: Iterable[Context]) -> Iterator[None]:
    """Tokens that contexts are given inside are guesses, and taken back at the end."""
    lengths = [(context, len(context.tokens)) for context in contexts]
    try:
        yield
    finally:
        for context, length in lengths:
            context.truncate(length)
