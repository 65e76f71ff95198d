"""What a server steps: a decoder, its MTP block where one drafts, and the caches of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from dsv4.cache.groups import MOST_DRAFTS
from dsv4.engine import Engine
from dsv4.errors import RequestError
from dsv4.model.context import Context
from dsv4.model.decoder import Outcome
from dsv4.model.runner import Runner
from dsv4.scheduler import Rows

Contexts = Mapping[int, Context]


class Model(Protocol):
    """A server's view of a model.

    Attributes
    ----------
    engine
        Limits of a step and of a context.
    vocabulary
        Ids are below this.
    drafts
        Tokens that are guessed ahead for each request; 0: none.
    """

    engine: Engine
    vocabulary: int
    drafts: int

    def check_fits(self, tokens: int) -> None:
        """Raise `RequestError` when a context of so many tokens, generated ones included, does not fit even alone."""

    def take(self, rows: Rows, context: Context) -> None:
        """Hold blocks for a request's rows in every cache they will be written to, or raise `CacheFull`."""

    def forward(self, rows: Sequence[Rows], contexts: Contexts) -> Outcome:
        """One step of the decoder; all rows of `Outcome` in the order of these."""

    def draft(self, rows: Sequence[Rows], contexts: Contexts, residual: torch.Tensor) -> Outcome:
        """One step of the MTP block; see `dsv4.model.decoder.Draft.forward`."""

    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits [N, V] of some rows of a step, in the host's memory."""

    def select(self, residual: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Some rows of a step's streams, [N, S, H]."""


class RunnerModel:
    """A `Runner` as a server steps it.

    Streams: all work is on the stream current at each call, and the host waits for the logits it reads.

    Parameters
    ----------
    drafts
        See `Model`; at most `MOST_DRAFTS`, and only where the runner has a draft model.

    Raises
    ------
    RequestError
        The number of guesses is out of range.
    """

    def __init__(self, runner: Runner, drafts: int = 0) -> None:
        if type(drafts) is not int or not 0 <= drafts <= MOST_DRAFTS or bool(drafts) != bool(runner.drafts):
            raise RequestError(
                f"{drafts!r} tokens are to be guessed {'with' if runner.drafts else 'without'} a draft model",
                f"guess 1 to {MOST_DRAFTS} tokens with one, 0 without",
            )
        first = runner.decoders[0]
        self.runner, self.drafts = runner, drafts
        self.engine: Engine = first.engine
        self.vocabulary: int = first.shard.config.vocab_size
        # Weights and caches were made on the default stream.
        runner.ws.synchronize()

    def check_fits(self, tokens: int) -> None:
        # The last token is returned and never fed back.
        rows = self.engine.max_num_batched_tokens
        for decoder in self.runner.decoders:
            decoder.caches.check_fits(tokens - 1, rows)
        for draft in self.runner.drafts:
            draft.caches.check_fits(min(tokens - 2 + self.drafts, self.engine.max_model_len), rows + self.drafts)

    def take(self, rows: Rows, context: Context) -> None:
        self.runner.take([rows], {rows.request: context})
        if self.drafts:
            # The block guesses on behind the step's last row.
            end = min(rows.end + self.drafts - 1, self.engine.max_model_len)
            caches = self.runner.drafts[self.runner.home(context)].caches
            context.blocks_of(caches).extend(rows.start, end)

    def forward(self, rows: Sequence[Rows], contexts: Contexts) -> Outcome:
        return self.runner.forward(rows, contexts)

    def draft(self, rows: Sequence[Rows], contexts: Contexts, residual: torch.Tensor) -> Outcome:
        return self.runner.draft(rows, contexts, residual)

    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return self.runner.logits(hidden[list(rows)]).cpu()

    def select(self, residual: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return residual[list(rows)]
