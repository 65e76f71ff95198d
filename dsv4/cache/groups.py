"""Groups of caches: what shares a block table."""

from __future__ import annotations

import attrs

from dsv4.config import LayerKind, ModelConfig


@attrs.frozen
class Group:
    """Caches that grow together, so that one block table serves them all.

    Attributes
    ----------
    name
        ``swa`` (every layer), ``compressed`` (C4, C128 and indexer keys), ``c4_state`` (with the indexer's),
        ``c128_state``.
    block_tokens
        Tokens one block covers.
    window
        Tokens before a row that it still reads, itself included; None: all.
    """

    name: str
    block_tokens: int
    window: int | None = None

    def first_needed(self, position: int) -> int:
        """The first position that a row at this one reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def most_blocks(self, tokens: int, rows: int, requests: int = 1) -> int:
        """Blocks that requests hold at most at once, if they are trimmed after each step.

        Parameters
        ----------
        tokens
            Length of their contexts, each.
        rows
            Rows of all of them together in the largest step.
        """
        whole = requests * -(-tokens // self.block_tokens)
        if self.window is None:
            return whole
        # A request's rows and the window before the first are n = window - 1 + rows positions; wherever they begin,
        # they touch (n - 2) // block_tokens + 2 blocks at most.
        return min(whole, (requests * (self.window - 3) + rows) // self.block_tokens + 2 * requests)


SWA, COMPRESSED, C4_STATE, C128_STATE = "swa", "compressed", "c4_state", "c128_state"

SWA_BLOCK = 64
COMPRESSED_BLOCK = 256
"""Tokens of a logical block of compressed states: 64 states at 4 to 1, 2 at 128 to 1."""

MOST_DRAFTS = 8
"""Tokens that may be guessed ahead. The MTP block's own rows go that far beyond the last token that is certain, and
start again behind it: what those rows read must still be there."""


def groups_of(config: ModelConfig, draft: bool = False) -> tuple[Group, ...]:
    """The groups a model needs; of its draft model (the MTP block), SWA-only, when `draft`."""
    kinds = {LayerKind.SWA} if draft else set(config.layer_kinds)
    found = [Group(SWA, SWA_BLOCK, config.sliding_window + (MOST_DRAFTS if draft else 0))]
    if kinds != {LayerKind.SWA}:
        found.append(Group(COMPRESSED, COMPRESSED_BLOCK))
    if LayerKind.C4 in kinds:
        found.append(Group(C4_STATE, 4, 8))
    if LayerKind.C128 in kinds:
        found.append(Group(C128_STATE, 8, 128))
    return tuple(found)
