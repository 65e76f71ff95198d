"""A step of the largest size in exactly the bytes that were reserved for it, at true sizes in virtual memory."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.decode_step.placement import measure, shelves


@pytest.mark.parametrize(("strategy", "tokens"), list(product(("event_fenced", "per_stream"), (7000, 7700, 8192))))
def test_what_is_reserved_is_enough(strategy: str, tokens: int) -> None:
    found = measure(strategy, 1.0, tokens)
    assert found["growths"] == 0 and found["held"] == found["reserved"]


def test_blocks_that_stay_uncut_make_the_pool_grow() -> None:
    """Control: kept for the same request whatever else is asked for, as they are while a pool is hardly used."""
    with shelves("always"):
        assert measure("event_fenced", 1.0, 8192)["growths"] > 0
