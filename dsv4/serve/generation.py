"""A request as the server runs it."""

from __future__ import annotations

import enum

import attrs

from dsv4.errors import NoRoom
from dsv4.model.context import Context
from dsv4.serve.errors import StepError
from dsv4.serve.sampling import Sampling


class Finish(enum.StrEnum):
    """Why a generation ended."""

    LENGTH = "length"
    """It has all the tokens it may have."""
    STOP = "stop"
    """Its last token is a stop token."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """A step with its rows failed, or it found no room; `Generation.error` says how."""


@attrs.define(eq=False)
class Generation:
    """A request's tokens as they come.

    Attributes
    ----------
    id
        Its number in the scheduler.
    finish
        None while it waits or runs.
    error
        What ended it, where `finish` is `Finish.ERROR`.
    drafts
        Guesses for its next tokens, which its next step verifies.
    """

    id: int
    sampling: Sampling
    context: Context
    prompt_tokens: int
    finish: Finish | None = None
    error: StepError | NoRoom | None = None
    drafts: list[int] = attrs.field(factory=list)

    @property
    def tokens(self) -> list[int]:
        """What was generated so far."""
        return self.context.tokens[self.prompt_tokens :]

    @property
    def generated(self) -> int:
        """How many they are."""
        return len(self.context.tokens) - self.prompt_tokens

    @property
    def tokens_left(self) -> int:
        """Tokens it may still be given."""
        return self.sampling.max_new_tokens - self.generated

    @property
    def ended_by(self) -> Finish | None:
        """`Finish.STOP` or `Finish.LENGTH` once its last token is such a one."""
        if self.generated and self.context.tokens[-1] in self.sampling.stop_tokens:
            return Finish.STOP
        return None if self.tokens_left else Finish.LENGTH
