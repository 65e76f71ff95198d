"""Block tables: growth, windows, refusal, and that nothing is lost."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.caches import Caches, Storage
from dsv4.cache.errors import CacheFull
from dsv4.cache.groups import Group, groups_of
from dsv4.cache.pages import Format
from dsv4.cache.sequence import Sequence
from dsv4.errors import ModelConfigError, RequestError
from dsv4.presets import FLASH, PRO

GROUPS = (Group("swa", 64, 128), Group("compressed", 256))


def allocators(swa: int = 8, compressed: int = 4) -> dict[str, BlockAllocator]:
    return {"swa": BlockAllocator("swa", swa), "compressed": BlockAllocator("compressed", compressed)}


def free(made: dict[str, BlockAllocator]) -> dict[str, int]:
    return {name: one.free_blocks for name, one in made.items()}


def test_blocks_follow_the_context_and_leave_with_the_window() -> None:
    """At position 300 with a window of 128 the first two blocks of 64 are gone, their entries -1."""
    made = allocators()
    sequence = Sequence(GROUPS, made)
    sequence.extend(0, 300)
    assert [len(sequence.tables[group.name]) for group in GROUPS] == [5, 2]
    sequence.extend(300, 301)
    assert sequence.tables["swa"][:2] == [-1, -1] and min(sequence.tables["swa"][2:]) >= 0
    assert free(made) == {"swa": 5, "compressed": 2}


def test_a_full_group_refuses_and_takes_nothing_from_the_others() -> None:
    """The error names the group; the sequence can go on when there is room again."""
    made = allocators(compressed=1)
    sequence = Sequence(GROUPS, made)
    with pytest.raises(CacheFull, match="'compressed' has 1 of 1 blocks free, 2 are needed"):
        sequence.extend(0, 300)
    assert free(made) == {"swa": 8, "compressed": 1}
    sequence.extend(0, 200)
    assert free(made) == {"swa": 4, "compressed": 0}


def test_completion_returns_every_block_once() -> None:
    """Also what was trimmed before is not returned twice."""
    made = allocators()
    sequence = Sequence(GROUPS, made)
    sequence.extend(0, 250)
    sequence.extend(250, 400)
    sequence.free()
    sequence.free()
    assert free(made) == {"swa": 8, "compressed": 4}


def test_rows_must_follow_what_is_held() -> None:
    """A gap would leave positions whose keys were never written."""
    sequence = Sequence(GROUPS, allocators())
    with pytest.raises(RequestError, match="do not follow"):
        sequence.extend(64, 65)


def test_a_block_is_freed_once() -> None:
    """Control of the accounting: a second free is refused."""
    made = BlockAllocator("swa", 2)
    blocks = made.take(1)
    made.give_back(blocks)
    with pytest.raises(RequestError, match="not taken"):
        made.give_back(blocks)


@settings(max_examples=60, deadline=None)
@given(some.lists(some.tuples(some.integers(0, 3), some.integers(1, 200)), max_size=30))
def test_no_block_has_two_owners_and_none_is_lost(steps: list[tuple[int, int]]) -> None:
    """Requests that grow, are refused, or finish, in any order."""
    made = allocators(swa=12, compressed=6)
    sequences = [Sequence(GROUPS, made) for _ in range(4)]
    ends = [0] * 4
    for which, count in steps:
        try:
            sequences[which].extend(ends[which], ends[which] + count)
            ends[which] += count
        except CacheFull:
            sequences[which].free()
            ends[which] = 0
        for group in GROUPS:
            held = [block for one in sequences for block in one.tables[group.name] if block >= 0]
            assert len(held) == len(set(held))
            assert len(held) + made[group.name].free_blocks == made[group.name].blocks
            needed = [group.first_needed(end - 1) // group.block_tokens if end else 0 for end in ends]
            assert all(min(one.tables[group.name][first:], default=0) >= 0
                       for one, first in zip(sequences, needed, strict=True))  # fmt: skip


def test_a_model_has_the_groups_its_layers_need() -> None:
    """Flash has all four, its MTP block the window only."""
    assert [group.name for group in groups_of(FLASH)] == ["swa", "compressed", "c4_state", "c128_state"]
    assert [group.name for group in groups_of(PRO, draft=True)] == ["swa"]


def test_the_bytes_of_a_models_caches_add_up() -> None:
    """One block of each group: pages of 43 windows, 21 C4, 20 C128 and 21 indexer layers, and states."""
    blocks = dict.fromkeys(("swa", "compressed", "c4_state", "c128_state"), 1)
    caches = Caches(FLASH, Storage(), blocks)
    assert caches.nbytes == 43 * 37440 + 21 * (37440 + 8640 + 32832 + 8640) + 20 * (1728 + 32832)
    with pytest.raises(RequestError, match="give them for"):
        Caches(FLASH, Storage(), {"swa": 1})


def test_a_format_that_cannot_hold_the_states_is_refused() -> None:
    """All that is wrong at once."""
    odd = attrs.evolve(FLASH, head_dim=500, index_head_dim=72)
    with pytest.raises(ModelConfigError) as refused:
        Caches(odd, Storage(Format.FP8_DS_MLA, Format.INDEXER_FP4), {})
    assert len(refused.value.problems) == 2
    with pytest.raises(ModelConfigError, match="keys are kept as INDEXER_FP8"):
        Caches(FLASH, Storage(Format.INDEXER_FP8, Format.INDEXER_FP8), {})
