"""What fits: how many blocks the caches get of the memory that they share with the workspace, and the weights."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from math import prod

import attrs
import torch

from dsv4.cache.groups import COMPRESSED_BLOCK
from dsv4.cache.paging import Paging
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.model.parameters import parameters
from dsv4.parallel import Ranks
from dsv4.serve.errors import BudgetError

TYPICAL = 4
"""Caches are made for contexts of the longest length divided by this, before they are made for longer ones: requests
are mostly short, and one of the longest fits in any case."""

Blocks = dict[str, int]


@attrs.frozen
class Caching:
    """Caches to be sized together: a model's, and its MTP block's where one drafts.

    Attributes
    ----------
    engine
        Limits of the requests that share them.
    drafts
        Tokens guessed ahead for each.
    """

    pagings: tuple[Paging, ...]
    engine: Engine
    drafts: int = 0

    def blocks(self, requests: int, length: int) -> list[Blocks]:
        """Blocks by group of each of the caches, for so many contexts of a length, or one of the longest."""
        return [self._blocks(paging, requests, length) for paging in self.pagings]

    def _blocks(self, paging: Paging, requests: int, length: int) -> Blocks:
        rows, ahead = self.engine.max_num_batched_tokens, self.drafts if paging.draft else 0
        longest = self.engine.max_model_len
        return {
            group.name: max(
                group.most_blocks(length, rows + requests * ahead, requests),
                group.most_blocks(longest, min(longest, rows) + ahead),
            )
            for group in paging.groups
        }

    def nbytes(self, blocks: Sequence[Blocks]) -> int:
        """Bytes of caches of that size."""
        pairs = zip(self.pagings, blocks, strict=True)
        return sum(own[group] * each for paging, own in pairs for group, each in paging.block_bytes().items())

    def within(self, nbytes: int | None) -> list[Blocks] | None:
        """The largest sizes of at most so many bytes, every group for the same requests; None if even one is too much.

        Parameters
        ----------
        nbytes
            None: as much as all requests at the longest length take.
        """
        requests, longest = self.engine.max_num_seqs, self.engine.max_model_len
        if nbytes is None:
            return self.blocks(requests, longest)
        typical = -(-longest // TYPICAL)
        sizes = [(count, typical) for count in range(1, requests + 1)]
        sizes += [(requests, length) for length in range(typical + COMPRESSED_BLOCK, longest, COMPRESSED_BLOCK)]
        sizes.append((requests, longest))
        fitting = bisect_right(sizes, nbytes, key=lambda size: self.nbytes(self.blocks(*size)))
        return self.blocks(*sizes[fitting - 1]) if fitting else None


def size_caches(memory: int | None, workspace: int, caching: Caching, homes: int = 1) -> list[Blocks]:
    """Blocks of the caches of each micro-batch.

    Parameters
    ----------
    memory
        Bytes that the workspace and all caches may take; None: the caches take what every request at once needs.
    workspace
        Bytes that the workspace holds already.
    homes
        Micro-batches, each with caches of its own.

    Raises
    ------
    BudgetError
        The workspace leaves too little for one context of the longest length. `fields`: memory, workspace, caches.
    """
    found = caching.within(None if memory is None else (memory - workspace) // homes)
    if found is None:
        least = homes * caching.nbytes(caching.blocks(1, caching.engine.max_model_len))
        raise BudgetError(
            f"a memory of {memory} bytes is too small: the workspace takes {workspace}, and the caches for one context "
            f"of {caching.engine.max_model_len} tokens at least {least}",
            f"give {workspace + least} bytes or more, or lower max_model_len or max_num_batched_tokens",
            memory=memory,
            workspace=workspace,
            caches=least,
        )
    return found


def check_weights(config: ModelConfig, dtype: torch.dtype, draft: bool, ranks: Ranks) -> None:
    """Raise `BudgetError` when a rank's weights are more than all memory of its device."""
    shapes = parameters(config).items()
    count = sum(prod(shape) for name, shape in shapes if draft or not name.startswith("mtp."))
    nbytes = count * dtype.itemsize // ranks.size
    if ranks.device.type == "cuda":
        there = torch.cuda.get_device_properties(ranks.device).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > there:
        raise BudgetError(
            f"the weights take {nbytes} bytes, and {ranks.device} has {there}",
            "serve fewer layers or experts of the model, or share it among more ranks",
            weights=nbytes,
            memory=there,
        )
