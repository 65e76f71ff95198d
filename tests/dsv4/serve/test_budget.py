"""Workspace and caches within one memory: nothing over it, every group for the same requests."""

from __future__ import annotations

import pytest

from dsv4.cache.paging import Paging, Storage
from dsv4.engine import Engine
from dsv4.model.presets import MIXED
from dsv4.presets import FLASH
from dsv4.serve.budget import Caching, size_caches
from dsv4.serve.errors import BudgetError

ENGINE = Engine(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=4096)
MIXED_CACHES = Caching((Paging(MIXED, Storage()), Paging(MIXED, Storage(), draft=True)), ENGINE, drafts=2)
LEAST = MIXED_CACHES.nbytes(MIXED_CACHES.blocks(1, 4096))
MOST = MIXED_CACHES.nbytes(MIXED_CACHES.blocks(8, 4096))


@pytest.mark.parametrize("share", (0.0, 0.1, 0.3, 0.5, 0.8, 1.0))
def test_caches_never_take_more_than_is_left_and_leave_little(share: float) -> None:
    """From just enough to everything: what is left over is less than one more step of the sizes."""
    memory = 1000 + LEAST + int(share * (MOST - LEAST))
    blocks = size_caches(memory, 1000, MIXED_CACHES)
    taken = MIXED_CACHES.nbytes(blocks)
    assert taken <= memory - 1000
    assert memory - 1000 - taken <= 0.15 * MOST


def test_every_group_grows_with_the_memory() -> None:
    """More memory never takes a block from any group, and ends with room for all requests at the longest length."""
    before = size_caches(LEAST, 0, MIXED_CACHES)
    for memory in range(LEAST, MOST + 1, (MOST - LEAST) // 23):
        blocks = size_caches(memory, 0, MIXED_CACHES)
        for old, new in zip(before, blocks, strict=True):
            assert all(new[group] >= old[group] for group in old)
        before = blocks
    assert size_caches(MOST, 0, MIXED_CACHES) == size_caches(None, 0, MIXED_CACHES) == MIXED_CACHES.blocks(8, 4096)


@pytest.mark.parametrize("homes", (1, 2))
def test_one_byte_too_few_is_refused_with_the_numbers(homes: int) -> None:
    """And the bytes that the error asks for are enough."""
    needed = 5000 + homes * LEAST
    with pytest.raises(
        BudgetError, match=f"workspace takes 5000, .* {homes * LEAST}.*\n.*{needed} bytes or more"
    ) as no:
        size_caches(needed - 1, 5000, MIXED_CACHES, homes)
    assert no.value.fields == {"memory": needed - 1, "workspace": 5000, "caches": homes * LEAST}
    size_caches(needed, 5000, MIXED_CACHES, homes)


def test_a_memory_smaller_than_the_workspace_is_refused() -> None:
    with pytest.raises(BudgetError, match="too small"):
        size_caches(10, 5000, MIXED_CACHES)


def test_half_of_what_flash_needs_holds_every_request_at_a_typical_length() -> None:
    """256 requests at a quarter of the longest context."""
    caching, longest = Caching((Paging(FLASH, Storage()),), Engine()), Engine().max_model_len
    (blocks,) = size_caches(caching.nbytes(caching.blocks(256, longest)) // 2, 0, caching)
    (typical,) = caching.blocks(256, longest // 4)
    assert all(blocks[group] >= typical[group] for group in typical)
