"""How a model's caches are cut into pages: what a block of each group holds, and its bytes."""

from __future__ import annotations

from collections import Counter

import attrs
import torch

from dsv4.cache.groups import C4_STATE, C128_STATE, COMPRESSED, COMPRESSED_BLOCK, SWA, SWA_BLOCK, Group, groups_of
from dsv4.cache.pages import Format, Pages, States, pages_of
from dsv4.config import RATIO, LayerKind, ModelConfig
from dsv4.errors import listed


@attrs.frozen
class Storage:
    """How the caches keep what they hold.

    Attributes
    ----------
    keys
        `Format.FP8_DS_MLA` or `Format.PLAIN`, of the window's keys and of compressed ones.
    indexer
        `Format.INDEXER_FP8`, `Format.INDEXER_FP4` or `Format.PLAIN`.
    plain
        Dtype of plain rows.
    states
        Dtype of compressor states: float32, or float64 for a model in it.
    """

    keys: Format = Format.FP8_DS_MLA
    indexer: Format = Format.INDEXER_FP8
    plain: torch.dtype = torch.float32
    states: torch.dtype = torch.float32


@attrs.frozen
class Paging:
    """The pages of a model's caches, or of its MTP block's (one SWA-only layer) when `draft`."""

    config: ModelConfig
    storage: Storage
    draft: bool = False

    def __attrs_post_init__(self) -> None:
        check(self.config, self.storage)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        return (LayerKind.SWA,) if self.draft else self.config.layer_kinds

    @property
    def groups(self) -> tuple[Group, ...]:
        return groups_of(self.config, self.draft)

    @property
    def window(self) -> Pages:
        """Pages of the window's keys."""
        return self._keys(SWA_BLOCK)

    def compressed(self, kind: LayerKind) -> Pages:
        """Pages of a kind's compressed keys."""
        return self._keys(COMPRESSED_BLOCK // RATIO[kind])

    @property
    def index(self) -> Pages:
        """Pages of indexer keys."""
        config = self.config
        block = COMPRESSED_BLOCK // RATIO[LayerKind.C4]
        return pages_of(self.storage.indexer, config.index_head_dim, config.qk_rope_head_dim, block, self.storage.plain)

    def _keys(self, block_size: int) -> Pages:
        config = self.config
        return pages_of(self.storage.keys, config.head_dim, config.qk_rope_head_dim, block_size, self.storage.plain)

    def of_layer(self, kind: LayerKind) -> dict[str, tuple[str, Pages | States]]:
        """Group and pages of each cache of a layer of this kind, by its name in `dsv4.cache.caches.LayerCaches`."""
        config, states = self.config, self.storage.states
        found: dict[str, tuple[str, Pages | States]] = {"window": (SWA, self.window)}
        if kind is not LayerKind.SWA:
            found["compressed"] = COMPRESSED, self.compressed(kind)
        if kind is LayerKind.C4:
            found["index"] = COMPRESSED, self.index
            found["state"] = C4_STATE, States(4 * config.head_dim, 4, states)
            found["index_state"] = C4_STATE, States(4 * config.index_head_dim, 4, states)
        if kind is LayerKind.C128:
            found["state"] = C128_STATE, States(2 * config.head_dim, 8, states)
        return found

    def block_bytes(self) -> dict[str, int]:
        """Bytes of one block of each group, in all layers."""
        found: Counter[str] = Counter()
        for kind in self.kinds:
            for group, pages in self.of_layer(kind).values():
                found[group] += pages.page_bytes
        return dict(found)


def check(config: ModelConfig, storage: Storage) -> None:
    """Raise `ModelConfigError` where a format cannot hold the model's states."""
    problems = []
    plain = config.head_dim - config.qk_rope_head_dim
    if storage.keys not in (Format.PLAIN, Format.FP8_DS_MLA):
        problems.append(f"keys are kept as {storage.keys.name}; a key cache is PLAIN or FP8_DS_MLA")
    if storage.indexer is Format.FP8_DS_MLA:
        problems.append("indexer keys are kept as FP8_DS_MLA; their cache is PLAIN, INDEXER_FP8 or INDEXER_FP4")
    if storage.keys is Format.FP8_DS_MLA and plain % 64:
        problems.append(f"head_dim - qk_rope_head_dim is {plain}; FP8_DS_MLA scales blocks of 64")
    if storage.indexer is Format.INDEXER_FP4 and config.index_head_dim % 32:
        problems.append(f"index_head_dim={config.index_head_dim}; INDEXER_FP4 scales blocks of 32")
    if problems:
        raise listed("the caches' format", problems)
