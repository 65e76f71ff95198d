"""The experts of several ranks, each on its own, add up to all of them."""

from __future__ import annotations

import torch

from dsv4 import ops

TOKENS, CHOSEN, EXPERTS, HIDDEN, INNER, RANKS = 9, 3, 8, 16, 24, 2


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_experts_of_other_ranks_add_nothing() -> None:
    """Whatever their rows of the scratch held before, NaN included; one token has no expert here at all."""
    x, weights = noise(TOKENS, HIDDEN, seed=0), noise(TOKENS, CHOSEN, seed=1).abs()
    w13, w2 = noise(EXPERTS, 2 * INNER, HIDDEN, seed=2), noise(EXPERTS, HIDDEN, INNER, seed=3)
    chosen = noise(TOKENS, EXPERTS, seed=4).argsort(1)[:, :CHOSEN].int()
    chosen[0] = torch.arange(CHOSEN)
    whole = ops.routed_experts(x, chosen, weights, w13, w2, 1.0)
    parts, share = [], EXPERTS // RANKS
    for rank in range(RANKS):
        own = chosen - rank * share
        own[(own < 0) | (own >= share)] = -1
        widths = HIDDEN, 2 * INNER, INNER, HIDDEN
        scratch = tuple(torch.full((TOKENS * CHOSEN, width), float("nan"), dtype=x.dtype) for width in widths)
        mine = slice(rank * share, (rank + 1) * share)
        given = x, own, weights, w13[mine].contiguous(), w2[mine].contiguous(), 1.0
        parts.append(ops.routed_experts(*given, scratch=scratch))
    assert not parts[1][0].any() and all(part.any() for part in parts)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)
