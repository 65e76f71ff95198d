"""A model that keeps tokens in its blocks and checks, at every row, that they are the request's own.

Its next token depends on the whole context as read back through the block tables: a block that is shared, freed too
early or not written anew is an error or another token.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence

import attrs
import torch

from dsv4.cache.caches import Caches, Storage
from dsv4.cache.groups import SWA, groups_of
from dsv4.cache.pages import Format
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.decoder import Outcome
from dsv4.model.presets import TINY
from dsv4.scheduler import Rows

VOCABULARY = 50
LIMITS = Engine(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=300)
PLAIN = Storage(Format.PLAIN, Format.PLAIN)


def following(tokens: Sequence[int]) -> int:
    """The token that comes after these."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def expected(prompt: list[int], count: int) -> list[int]:
    """What greedy generation gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


class StandIn:
    """See above.

    Parameters
    ----------
    tokens
        The caches hold so many in all, with nothing trimmed.
    right
        Share of the guesses that are what the model will choose.
    fail_at
        Step that raises, counted from 0.
    """

    vocabulary = VOCABULARY

    def __init__(
        self, tokens: int = 2000, *, drafts: int = 0, right: float = 0.5, fail_at: int = -1, engine: Engine = LIMITS
    ) -> None:
        self.engine, self.drafts, self.right, self.fail_at = engine, drafts, right, fail_at
        self.caches = [
            Caches(TINY, PLAIN, {group.name: -(-tokens // group.block_tokens) for group in groups_of(TINY, draft)},
                   draft=draft)
            for draft in (False, True)
        ]  # fmt: skip
        self.kept: dict[tuple[int, str, int], tuple[int, int]] = {}
        self.draw = random.Random(0)
        self.steps: list[tuple[Rows, ...]] = []
        self.failed: tuple[Rows, ...] = ()

    def check_fits(self, tokens: int) -> None:
        self.caches[0].check_fits(tokens - 1, self.engine.max_num_batched_tokens)

    def take(self, rows: Rows, context: Context) -> None:
        context.blocks_of(self.caches[0]).extend(rows.start, rows.end)
        if self.drafts:
            context.blocks_of(self.caches[1]).extend(rows.start, rows.end + self.drafts - 1)

    def forward(self, rows: Sequence[Rows], contexts: Mapping[int, Context]) -> Outcome:
        """Rows of `hidden` are one-hot logits."""
        self.steps.append(tuple(rows))
        if len(self.steps) - 1 == self.fail_at:
            self.failed = tuple(rows)
            raise ArithmeticError("on purpose")
        chosen = [
            following(self._read(0, contexts[one.request], position, 0))
            for one in rows
            for position in range(one.start, one.end)
        ]
        return self._outcome(rows, chosen)

    def draft(self, rows: Sequence[Rows], contexts: Mapping[int, Context], residual: torch.Tensor) -> Outcome:
        """A row knows the token behind its own, and guesses the one after."""
        assert len(residual) == sum(one.count for one in rows)
        chosen = []
        for one in rows:
            for position in range(one.start, one.end):
                read = self._read(1, contexts[one.request], position, 1)
                right = self.draw.random() < self.right
                chosen.append(following(contexts[one.request].tokens[: position + 2]) if right else read[-1])
        return self._outcome(rows, chosen)

    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return hidden[list(rows)]

    def select(self, residual: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return residual[list(rows)]

    def _read(self, which: int, context: Context, position: int, shift: int) -> list[int]:
        """Write a row's token to every group, and read back what the row sees there."""
        caches, tokens = self.caches[which], context.tokens
        for group in caches.groups:
            table, block = context.blocks_of(caches).tables[group.name], group.block_tokens

            def slot(at: int) -> tuple[int, str, int]:
                assert table[at // block] >= 0, f"position {at} of {group.name} is gone"  # noqa: B023
                return which, group.name, table[at // block] * block + at % block  # noqa: B023

            self.kept[slot(position)] = tokens[position + shift], position
            # What attention reads; a draft's group keeps a little more.
            seen = attrs.evolve(group, window=TINY.sliding_window) if group.name == SWA else group
            for at in range(seen.first_needed(position), position + 1):
                assert self.kept[slot(at)] == (tokens[at + shift], at), f"{group.name} holds another's {at}"
        return tokens[: position + 1 + shift]

    def _outcome(self, rows: Sequence[Rows], chosen: list[int]) -> Outcome:
        sampled, end = [], 0
        for one in rows:
            end += one.count
            if one.samples:
                sampled.append(end - 1)
        logits = torch.nn.functional.one_hot(torch.tensor(chosen), VOCABULARY).float()
        return Outcome(logits, torch.zeros(end, 1, 1), tuple(sampled))

    @property
    def free(self) -> list[int]:
        """Free blocks of every group."""
        return [one.free_blocks for caches in self.caches for one in caches.allocators.values()]
