"""Speculative decoding: the MTP block guesses tokens, and the model's next step verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import attrs
import torch

from dsv4.model.decoder import Outcome
from dsv4.scheduler import Rows
from dsv4.serve.generation import Generation
from dsv4.serve.model import Model
from dsv4.serve.turn import Turn, restored


@attrs.define
class Acceptance:
    """How often the draft model was right.

    Attributes
    ----------
    guessed, right
        Tokens that were verified, and those of them that the model itself chose.
    """

    guessed: int = 0
    right: int = 0

    def add(self, turn: Turn) -> None:
        """Count a turn's guesses."""
        self.guessed += len(turn.guesses)
        self.right += sum(token == guess for token, guess in zip(turn.tokens, turn.guesses, strict=False))

    @property
    def rate(self) -> float:
        """Share of the guesses that were right; 0 where there were none."""
        return self.right / self.guessed if self.guessed else 0.0


def guess(model: Model, step: Sequence[Turn], residual: torch.Tensor) -> None:
    """Guess the next tokens of every turn that has given one; the guesses are left in `Generation.drafts`.

    The block runs over the step's certain rows first, so that its own cache keeps up, then alone on its own streams,
    a token at a time.

    Parameters
    ----------
    residual
        [T, S, H] of all rows of the step.
    """
    contexts = {turn.generation.id: turn.generation.context for turn in step}
    rows = [turn.certain for turn in step]
    taken = [turn.first + row for turn, one in zip(step, rows, strict=True) for row in range(one.count)]
    lasts = [end - 1 for end in accumulate(one.count for one in rows)]
    asking = [(turn.generation, last) for turn, last in zip(step, lasts, strict=True) if turn.rows.samples]
    for turn in step:
        turn.generation.drafts.clear()
    with restored(contexts.values()):
        outcome = model.draft(rows, contexts, model.select(residual, taken))
        for ahead in range(model.drafts):
            # The last token is never fed back: who has one left to generate needs no guess.
            asking = [(generation, last) for generation, last in asking if generation.tokens_left > 1]
            if not asking:
                return
            if ahead:
                places = [last for _, last in asking]
                rows = [Rows(one.id, len(one.context.tokens) - 2, 1, False, True) for one, _ in asking]
                outcome = model.draft(rows, contexts, model.select(outcome.residual, places))
                asking = [(generation, row) for row, (generation, _) in enumerate(asking)]
            _extend(model, asking, outcome)


def _extend(model: Model, asking: Sequence[tuple[Generation, int]], outcome: Outcome) -> None:
    """One guess more for each generation, from the row it stands in."""
    best = model.logits(outcome.hidden, [row for _, row in asking]).argmax(1)
    for (generation, _), token in zip(asking, best.tolist(), strict=True):
        generation.drafts.append(token)
        generation.context.append([token])
