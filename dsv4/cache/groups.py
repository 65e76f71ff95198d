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


SWA, COMPRESSED, C4_STATE, C128_STATE = "swa", "compressed", "c4_state", "c128_state"

SWA_BLOCK = 64
COMPRESSED_BLOCK = 256
"""Tokens of a logical block of compressed states: 64 states at 4 to 1, 2 at 128 to 1."""


def groups_of(config: ModelConfig, draft: bool = False) -> tuple[Group, ...]:
    """The groups a model needs; of its draft model (the MTP block), SWA-only, when `draft`."""
    kinds = {LayerKind.SWA} if draft else set(config.layer_kinds)
    found = [Group(SWA, SWA_BLOCK, config.sliding_window)]
    if kinds != {LayerKind.SWA}:
        found.append(Group(COMPRESSED, COMPRESSED_BLOCK))
    if LayerKind.C4 in kinds:
        found.append(Group(C4_STATE, 4, 8))
    if LayerKind.C128 in kinds:
        found.append(Group(C128_STATE, 8, 128))
    return tuple(found)
