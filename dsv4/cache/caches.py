"""The paged caches of a model, and the requests that hold their blocks."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.groups import C4_STATE, C128_STATE, COMPRESSED, COMPRESSED_BLOCK, SWA, SWA_BLOCK, groups_of
from dsv4.cache.pages import Format, Pages, States, pages_of
from dsv4.cache.sequence import Sequence
from dsv4.config import LayerKind, ModelConfig
from dsv4.errors import RequestError, listed

RATIO = {LayerKind.C4: 4, LayerKind.C128: 128}


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


@attrs.frozen(eq=False)
class LayerCaches:
    """One layer's caches, and how their pages are laid out; None where its kind has none.

    Attributes
    ----------
    window, compressed, index
        Keys of the sliding window, compressed keys, indexer keys.
    state, index_state
        States of the compressor and of the indexer's, [blocks, rows, columns].
    """

    window: torch.Tensor
    compressed: torch.Tensor | None = None
    index: torch.Tensor | None = None
    state: torch.Tensor | None = None
    index_state: torch.Tensor | None = None


class Caches:
    """Caches of every layer of a model (or of its MTP block), and an allocator for each group.

    Parameters
    ----------
    blocks
        Blocks of each group, by `dsv4.cache.groups` name; `nbytes` says what they take.
    draft
        For the MTP block, one SWA-only layer.

    Attributes
    ----------
    groups, allocators, layers, storage
        What there is.
    """

    def __init__(
        self, config: ModelConfig, storage: Storage, blocks: Mapping[str, int], *, draft: bool = False
    ) -> None:
        check(config, storage)
        self.config = config
        self.storage = storage
        self.kinds = (LayerKind.SWA,) if draft else config.layer_kinds
        self.groups = groups_of(config, draft)
        names = {group.name for group in self.groups}
        if blocks.keys() != names:
            raise RequestError(
                f"blocks are given for {', '.join(sorted(blocks))}", f"give them for {', '.join(sorted(names))}"
            )
        self.allocators = {name: BlockAllocator(name, blocks[name]) for name in sorted(names)}
        self.layers = [self._layer(kind, blocks) for kind in self.kinds]

    def sequence(self) -> Sequence:
        """Tables of a new request, empty."""
        return Sequence(self.groups, self.allocators)

    def _layer(self, kind: LayerKind, blocks: Mapping[str, int]) -> LayerCaches:
        made = {name: pages.allocate(blocks[group]) for name, (group, pages) in pages_of_layer(self, kind).items()}
        return LayerCaches(**made)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(
            self.allocators[group].blocks * pages.page_bytes
            for kind in self.kinds
            for group, pages in pages_of_layer(self, kind).values()
        )

    @property
    def window_pages(self) -> Pages:
        """Pages of the window's keys."""
        return self._keys(SWA_BLOCK)

    def compressed_pages(self, kind: LayerKind) -> Pages:
        """Pages of a kind's compressed keys."""
        return self._keys(COMPRESSED_BLOCK // RATIO[kind])

    @property
    def index_pages(self) -> Pages:
        """Pages of indexer keys."""
        config = self.config
        block = COMPRESSED_BLOCK // RATIO[LayerKind.C4]
        return pages_of(self.storage.indexer, config.index_head_dim, config.qk_rope_head_dim, block, self.storage.plain)

    def _keys(self, block_size: int) -> Pages:
        config = self.config
        return pages_of(self.storage.keys, config.head_dim, config.qk_rope_head_dim, block_size, self.storage.plain)


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


def pages_of_layer(caches: Caches, kind: LayerKind) -> dict[str, tuple[str, Pages | States]]:
    """Group and pages of each cache of a layer of this kind, by its name in `LayerCaches`."""
    config, states = caches.config, caches.storage.states
    found: dict[str, tuple[str, Pages | States]] = {"window": (SWA, caches.window_pages)}
    if kind is not LayerKind.SWA:
        found["compressed"] = COMPRESSED, caches.compressed_pages(kind)
    if kind is LayerKind.C4:
        found["index"] = COMPRESSED, caches.index_pages
        found["state"] = C4_STATE, States(4 * config.head_dim, 4, states)
        found["index_state"] = C4_STATE, States(4 * config.index_head_dim, 4, states)
    if kind is LayerKind.C128:
        found["state"] = C128_STATE, States(2 * config.head_dim, 8, states)
    return found
