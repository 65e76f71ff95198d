"""Which gathered keys a prefill row attends to, on a GPU: those of the reference, number by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4 import ops
from dsv4.ops import OpError, kernels

WINDOW, MOST = 128, 512
REQUESTS = ((0, 700), (300, 65), (5000, 1))
"""First position and rows."""


CASES = ((0, False), (4, True), (128, False))
"""Ratios, and whether the indexer chose."""


def given(ratio: int, chosen: bool, device: str = "cuda") -> tuple[Any, ...]:
    """Inputs of the op for `REQUESTS`, gathered one after the other."""
    positions = torch.cat([torch.arange(first, first + rows) for first, rows in REQUESTS]).to(device)
    group = torch.cat([torch.full((rows,), index) for index, (_, rows) in enumerate(REQUESTS)]).to(torch.int32)
    counts = [(first + rows) // ratio if ratio else 0 for first, rows in REQUESTS]
    oldest = [max(0, first - WINDOW + 1) for first, _ in REQUESTS]
    seen = [first + rows - old for (first, rows), old in zip(REQUESTS, oldest, strict=True)]
    compressed = torch.tensor([0, *counts]).cumsum(0)
    windows = torch.tensor([int(compressed[-1]), *seen]).cumsum(0)
    picked = None
    if chosen:
        places = torch.arange(MOST, device=device)
        number = ((positions + 1) // ratio).clamp(max=MOST)[:, None]
        picked = torch.where(places < number, 2 * places % number.clamp(min=1), -1).to(torch.int32)
        picked = torch.where(places < number, picked.masked_fill(places >= number, 1 << 30).sort(1).values, -1)
    starts = [one[:-1].to(device, torch.int32) for one in (compressed, windows)]
    first = torch.tensor(oldest, dtype=torch.int32, device=device)
    return positions, group.to(device), *starts, first, picked, ratio, WINDOW


@pytest.mark.parametrize(("ratio", "chosen"), CASES)
def test_numbers(ratio: int, chosen: bool) -> None:
    inputs = given(ratio, chosen)
    rows = len(inputs[0])
    width = WINDOW + (MOST if chosen else 40)
    found = torch.full((rows, width), 7, dtype=torch.int32, device="cuda"), torch.full_like(inputs[1], 7)
    wanted = torch.empty_like(found[0]), torch.empty_like(found[1])
    assert kernels.FAST["combine_indices"](*inputs, *found)
    ops.combine_indices.reference(*inputs, *wanted)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert (found[0][0, 1:] == -1).all() and found[1][0] == 1


@pytest.mark.parametrize(("name", "place", "value"), [("ratio", -2, -4), ("ratio", -2, 1 << 32), ("window", -1, -1)])
def test_a_number_that_fits_no_layer_is_refused(name: str, place: int, value: int) -> None:
    inputs = list(given(4, True))
    inputs[place] = value
    rows = len(inputs[0])
    outs = torch.full((rows, WINDOW + MOST), 7, dtype=torch.int32, device="cuda"), torch.full_like(inputs[1], 7)
    with pytest.raises(OpError, match=name):
        kernels.FAST["combine_indices"](*inputs, *outs)
    assert (outs[0] == 7).all()
