"""The paged caches of a model, and the requests that hold their blocks."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.pages import Pages
from dsv4.cache.paging import Paging, Storage
from dsv4.cache.sequence import Sequence
from dsv4.config import LayerKind, ModelConfig
from dsv4.errors import RequestError

__all__ = ["Caches", "LayerCaches", "Storage"]


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
        Blocks of each group, by `dsv4.cache.groups` name; `dsv4.cache.paging.Paging.block_bytes` says what one takes.
    draft
        For the MTP block, one SWA-only layer.
    device
        Where the pages are.

    Attributes
    ----------
    paging, groups, allocators, layers
        What there is.
    """

    def __init__(
        self,
        config: ModelConfig,
        storage: Storage,
        blocks: Mapping[str, int],
        *,
        draft: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.storage = storage
        self.paging = Paging(config, storage, draft)
        self.kinds = self.paging.kinds
        self.groups = self.paging.groups
        names = {group.name for group in self.groups}
        if blocks.keys() != names:
            raise RequestError(
                f"blocks are given for {', '.join(sorted(blocks))}", f"give them for {', '.join(sorted(names))}"
            )
        self.allocators = {name: BlockAllocator(name, blocks[name]) for name in sorted(names)}
        self.layers = [self._layer(kind, blocks, device) for kind in self.kinds]

    def sequence(self) -> Sequence:
        """Tables of a new request, empty."""
        return Sequence(self.groups, self.allocators)

    def check_fits(self, tokens: int, rows: int) -> None:
        """Raise `RequestError` when a context would not fit even alone.

        Parameters
        ----------
        tokens
            Positions of the context that are computed.
        rows
            Rows of it in one step, at most.
        """
        for group in self.groups:
            needed, blocks = group.most_blocks(tokens, min(tokens, rows)), self.allocators[group.name].blocks
            if needed > blocks:
                raise RequestError(
                    f"a context of {tokens} tokens needs {needed} blocks of cache group {group.name!r}, which has "
                    f"{blocks} in all",
                    "shorten the prompt, ask for fewer tokens, or give the caches more memory",
                    group=group.name,
                    blocks=blocks,
                    needed=needed,
                )

    def _layer(self, kind: LayerKind, blocks: Mapping[str, int], device: torch.device | str) -> LayerCaches:
        pages = self.paging.of_layer(kind)
        return LayerCaches(**{name: one.allocate(blocks[group], device) for name, (group, one) in pages.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(self.allocators[group].blocks * nbytes for group, nbytes in self.paging.block_bytes().items())

    @property
    def peak_nbytes(self) -> int:
        """Bytes of the blocks that were taken at once at most, group by group."""
        return sum(self.allocators[group].peak * nbytes for group, nbytes in self.paging.block_bytes().items())

    @property
    def window_pages(self) -> Pages:
        """Pages of the window's keys."""
        return self.paging.window

    def compressed_pages(self, kind: LayerKind) -> Pages:
        """Pages of a kind's compressed keys."""
        return self.paging.compressed(kind)

    @property
    def index_pages(self) -> Pages:
        """Pages of indexer keys."""
        return self.paging.index
