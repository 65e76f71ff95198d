"""Row counts, prefill chunks and micro-batches of a step, against counting by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.batch import MAX_LOGITS_BYTES, batch_of, bound, gather_group, index_chunk, split
from dsv4.config import LayerKind
from dsv4.engine import Engine, capture_sizes
from dsv4.layouts import stage_layouts
from dsv4.presets import FLASH
from dsv4.scheduler import Rows, Step
from dsv4.shard import Shard

SHARD, ENGINE = Shard(FLASH), Engine()
ROWS = st.lists(
    st.tuples(st.integers(0, 20_000), st.integers(1, 3000), st.booleans()).map(
        lambda one: Rows(0, one[0], one[1] if one[2] else 1, one[2], True)
    ),
    min_size=1,
    max_size=12,
).map(lambda rows: tuple(sorted(rows, key=lambda one: one.prefill)))


def prompt(start: int, count: int) -> Rows:
    return Rows(0, start, count, True, False)


def test_a_mixed_step_is_summed_up() -> None:
    rows = (Rows(0, 1000, 1, False, True), Rows(1, 126, 1, False, True), prompt(256, 100))
    found = batch_of(rows, SHARD, ENGINE)
    assert (found.tokens, found.decode, found.prefill, found.short_context) == (102, 2, 100, True)
    assert not found.boundary
    assert (found.index_rows, found.index_keys) == (100, 89)
    assert found.gather_keys == {
        LayerKind.SWA: 127 + 100,
        LayerKind.C4: 89 + 127 + 100,
        LayerKind.C128: 3 + 127 + 100,
    }


@pytest.mark.parametrize(
    ("start", "count", "crosses"), [(126, 1, False), (127, 1, True), (0, 127, False), (100, 28, True)]
)
def test_a_boundary_is_the_last_token_of_128(start: int, count: int, crosses: bool) -> None:
    assert batch_of((prompt(start, count),), SHARD, ENGINE).boundary is crosses


def test_a_group_is_as_wide_as_its_widest_request() -> None:
    prompts = [prompt(0, 10), prompt(0, 50)]
    assert gather_group(prompts, LayerKind.SWA, SHARD, ENGINE) == 2 * 50


def test_logits_beyond_the_limit_are_cut() -> None:
    """8192 rows over 200,000 keys would take 6.1 GiB."""
    engine = Engine(max_model_len=1 << 20)
    rows, keys = index_chunk([prompt(800_000 - 8192, 8192)], engine)
    assert keys == 200_000
    assert MAX_LOGITS_BYTES - 4 * keys < rows * keys * 4 <= MAX_LOGITS_BYTES + 4 * keys


@given(rows=ROWS)
def test_micro_batches_hold_every_token_once(rows: tuple[Rows, ...]) -> None:
    tokens = sum(one.count for one in rows)
    parts = split(Step(0, rows, tokens, 0))
    sizes = [sum(one.count for one in part) for part in parts]
    assert sum(sizes) == tokens and max(sizes) - min(sizes) <= (1 if tokens > 1 else 0)
    assert sorted(p for part in parts for one in part for p in range(one.start, one.end)) == sorted(
        p for one in rows for p in range(one.start, one.end)
    )
    for part in parts:
        assert all(one.count == 1 for one in part if not one.prefill)


@given(rows=ROWS)
def test_no_step_is_larger_than_what_is_reserved(rows: tuple[Rows, ...]) -> None:
    if sum(one.count for one in rows) > ENGINE.max_num_batched_tokens:
        rows = tuple(one for one in rows if not one.prefill) or rows[:1]
    found = batch_of(rows, SHARD, ENGINE)
    for kind in LayerKind:
        limit = bound(kind, SHARD, ENGINE)
        dims = {
            "T": found.tokens,
            "Td": found.decode,
            "Tp": found.prefill,
            "L": ENGINE.max_model_len,
            "index_rows": found.index_rows,
            "index_keys": found.index_keys,
            "gather_keys": found.gather_keys[kind],
        }
        for layout in stage_layouts(SHARD, kind).values():
            assert layout.size(**{name: dims[name] for name in layout.dim_names}) <= layout.size(
                **{name: limit[name] for name in layout.dim_names}
            )


def test_capture_sizes_are_those_of_vllm() -> None:
    sizes = capture_sizes()
    assert sizes[:5] == (1, 2, 4, 8, 16) and sizes[-1] == 512
    assert 256 in sizes and 264 not in sizes and 272 in sizes
    assert len(sizes) == 3 + 32 + 16
    assert capture_sizes(8) == (1, 2, 4, 8)
