"""A step of the largest size in exactly the bytes that were reserved for it, at true sizes in virtual memory."""

from __future__ import annotations

import pytest

from benchmarks.decode_step.placement import measure, shelves
from workspace.pool import Pool


@pytest.mark.parametrize("tokens", (7000, 7350, 7700, 8192))
@pytest.mark.parametrize(("strategy", "headroom"), (("event_fenced", 1.0), ("per_stream", 1.25)))
def test_what_is_reserved_is_enough(strategy: str, headroom: float, tokens: int) -> None:
    """`per_stream` needs room for the pieces that streams leave each other."""
    found = measure(strategy, headroom, tokens)
    assert found["growths"] == 0 and found["held"] == found["reserved"]


@pytest.mark.parametrize("tokens", (64, 512, 587, 1024, 2048, 3360, 4096, 5397))
def test_what_is_reserved_for_a_size_is_enough_for_it(tokens: int) -> None:
    """Small ones have bytes to spare, and those of 1,024 tokens and up few: little leases must not lie in between."""
    found = measure("event_fenced", 1.0, tokens, most=tokens)
    assert found["growths"] == 0 and (found["reserved"] < 1.1 * found["live"]) == (tokens >= 1024)


def test_blocks_that_stay_uncut_make_the_pool_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: kept for the same request whatever else is asked for, as they are while a pool is hardly used."""
    monkeypatch.setattr(Pool, "take_back_large", lambda pool: None)
    with shelves("always"):
        assert measure("event_fenced", 1.0, 8192)["growths"] > 0
