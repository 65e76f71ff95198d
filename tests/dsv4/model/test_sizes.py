"""What a step takes is never more than what is declared, and what is declared is taken by some step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as some

from dsv4.batch import MAX_LOGITS_BYTES, batch_of
from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.model.gather import gathers
from dsv4.model.presets import MIXED
from dsv4.model.sizes import dims_at_most, logits_of
from dsv4.scheduler import Rows
from dsv4.shard import Shard

ENGINE = Engine(max_num_batched_tokens=2048, max_num_seqs=8, max_model_len=4096)
SHARD = Shard(MIXED, attention="flashinfer")

PARTS = some.lists(some.tuples(some.integers(0, 4095), some.integers(1, 1024)), min_size=1, max_size=8)
"""First position and rows of prompts."""


def prompts(parts: list[tuple[int, int]]) -> list[Rows]:
    """As many as the token budget takes."""
    found: list[Rows] = []
    left = ENGINE.max_num_batched_tokens
    for start, count in parts:
        count = min(count, left, ENGINE.max_model_len - start)
        if count:
            found.append(Rows(len(found), start, count, True, True))
            left -= count
    return found


@settings(max_examples=200, deadline=None)
@given(PARTS)
def test_a_step_takes_no_more_than_is_declared(parts: list[tuple[int, int]]) -> None:
    rows = prompts(parts)
    offsets = [sum(one.count for one in rows[:place]) for place in range(len(rows) + 1)]
    made = tuple((offsets[place], offsets[place + 1], one.end) for place, one in enumerate(rows))
    logits = logits_of(made)
    for kind in LayerKind:
        most = dims_at_most(kind, SHARD, ENGINE)
        assert logits["index_rows"] * logits["index_keys"] <= most["index_rows"] * most["index_keys"]
        groups = gathers(rows, kind, MIXED, ENGINE, offsets)
        assert sum(one.last_row - one.first_row for one in groups) == offsets[-1]
        assert all(one.keys <= most["gather_keys"] for one in groups)
        assert most["T"] >= batch_of(tuple(rows), SHARD, ENGINE).tokens
    for first, last, context in made:  # a request's logits fit, or as many of its rows as the limit holds
        room = logits["index_rows"] * logits["index_keys"]
        assert room >= min((last - first) * (context // 4), MAX_LOGITS_BYTES // 4) and room >= context // 4


def test_what_is_declared_is_taken_by_the_largest_prompt() -> None:
    """Logits of the whole budget over the longest context; of gathered keys, what four contexts have beside it."""
    whole = logits_of(((0, ENGINE.max_num_batched_tokens, ENGINE.max_model_len),))
    most = dims_at_most(LayerKind.C4, SHARD, ENGINE)
    assert (most["index_rows"], most["index_keys"]) == (whole["index_rows"], whole["index_keys"]) == (2048, 1024)
    assert most["gather_keys"] == 4 * (1024 + 128) + 2048
    assert logits_of(()) == {"index_rows": 0, "index_keys": 0}


def test_a_prompt_beyond_the_limit_is_cut_by_rows() -> None:
    """Of a context of a million tokens 512 rows take half a gibibyte."""
    found = logits_of(((0, 8192, 1 << 20),))
    assert found["index_keys"] == 1 << 18 and found["index_rows"] == 512
