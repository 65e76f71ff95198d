"""What requests hold at most, and what a block takes, are known before the caches are made."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.caches import Caches, Storage
from dsv4.cache.groups import Group, groups_of
from dsv4.cache.paging import Paging
from dsv4.cache.sequence import Sequence
from dsv4.presets import FLASH

GROUPS = (Group("swa", 64, 128), Group("compressed", 256), Group("c4_state", 4, 8), Group("c128_state", 8, 128))


@settings(max_examples=60, deadline=None)
@given(some.lists(some.lists(some.integers(1, 200), min_size=4, max_size=4), min_size=1, max_size=12))
def test_requests_never_hold_more_than_most_blocks_says(steps: list[list[int]]) -> None:
    """Four requests, each fed any number of rows in each step, and trimmed behind it."""
    made = {group.name: BlockAllocator(group.name, 4000) for group in GROUPS}
    sequences, ends = [Sequence(GROUPS, made) for _ in range(4)], [0] * 4
    for counts in steps:
        for which, count in enumerate(counts):
            sequences[which].extend(ends[which], ends[which] + count)
            ends[which] += count
        for sequence, end in zip(sequences, ends, strict=True):
            sequence.trim(end)
    rows = max(map(sum, steps))
    for group in GROUPS:
        assert made[group.name].peak <= group.most_blocks(max(ends), rows, len(ends))


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_one_request_may_need_all_of_most_blocks(group: Group) -> None:
    """The bound is met: with one block fewer some request would be refused."""
    most = 0
    for start in range(256, 256 + group.block_tokens):
        made = {group.name: BlockAllocator(group.name, 4000)}
        sequence = Sequence((group,), made)
        sequence.extend(0, start)
        sequence.extend(start, start + 66)
        held = sum(block >= 0 for block in sequence.tables[group.name])
        most = max(most, held)
    tokens = 256 + group.block_tokens - 1 + 66
    assert most == group.most_blocks(tokens, 66)


def test_the_bytes_of_a_block_are_those_of_the_caches() -> None:
    """One block of each group of Flash, and of its MTP block."""
    for draft in (False, True):
        blocks = dict.fromkeys((group.name for group in groups_of(FLASH, draft)), 1)
        caches = Caches(FLASH, Storage(), blocks, draft=draft)
        assert sum(Paging(FLASH, Storage(), draft).block_bytes().values()) == caches.nbytes
        assert caches.peak_nbytes == 0
        caches.sequence().extend(0, 1)
        assert caches.peak_nbytes == caches.nbytes
