"""How attention shares its work: blocks that stay for several rows, blocks that share one, keys of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.kernels.calls import STATES, call
from benchmarks.kernels.maker import Call
from dsv4.cache.pages import Format, pages_of
from tests.dsv4.cuda.check import bits, check, same_bits

DECODE = "sparse_attention_decode"
WINDOW_CACHE, WINDOW_SLOTS, WINDOW_LENS, EXTRA_SLOTS, EXTRA_LENS = 1, 2, 3, 5, 6
"""Places of inputs."""


def lens(made: Call, window: list[int], extra: list[int]) -> Call:
    """The same call with these numbers of keys, row after row and again from the front."""
    for place, given in ((WINDOW_LENS, window), (EXTRA_LENS, extra)):
        held = made.inputs[place]
        held.copy_(torch.tensor([given[row % len(given)] for row in range(len(held))], dtype=torch.int32))
    return made


@pytest.mark.parametrize("layout", [Format.FP8_DS_MLA, Format.PLAIN])
@pytest.mark.parametrize("rows", [1, 9, 16, 17, 33, 34, 66, 67, 133, 400])
def test_however_many_blocks_share_a_row(rows: int, layout: Format) -> None:
    """From eight blocks a row to several rows a block, with every place of the lists in use."""
    check(call(DECODE, rows, full=True, layout=layout))


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("rows", [3, 20, 50, 300])
def test_rows_of_few_keys_and_of_none(rows: int, splits: int) -> None:
    """Empty rows, rows of one tile and of a part of one, in turns: what warps wait for stays in step."""
    made = lens(call(DECODE, rows, splits=splits), [0, 1, 0, 0, 64, 0, 128, 3, 63], [0, 0, 1, 64, 1, 0, 512, 0, 2])
    check(made)
    assert not bits(made.outs[0][0]).any()


@pytest.mark.parametrize("rows", [2, 70, 300])
def test_slots_that_are_nowhere(rows: int) -> None:
    """A slot of -1 within the list is no key: the same as a list without it."""
    made, other = call(DECODE, rows, full=True), call(DECODE, rows, full=True)
    wide = made.inputs[EXTRA_SLOTS]
    wide[:, 100:300] = -1
    kept = torch.cat((wide[:, :100], wide[:, 300:], wide[:, 100:300]), 1)
    other.inputs[EXTRA_SLOTS].copy_(kept)
    other.inputs[EXTRA_LENS].fill_(wide.shape[1] - 200)
    found, wanted = made.poison(0xFF).run()[0].float(), other.reference(torch.float64)[0].float()
    assert (found - wanted).norm() <= 5e-3 * wanted.norm()
    assert (found - call(DECODE, rows, full=True).run()[0].float()).norm() > 5e-2 * wanted.norm()


@pytest.mark.parametrize("exponent", [-100, -20, 5, 12, 40, 110])
def test_scales_of_any_size(exponent: int) -> None:
    """Scale bytes from nearly 0 to nearly 254; queries are as small as the keys are large."""
    made = call(DECODE, 40)
    for place in (WINDOW_CACHE, 4):
        held = made.inputs[place]
        own = pages_of(Format.FP8_DS_MLA, 512, 64, 64, torch.bfloat16)
        values = torch.randn(STATES, 512, generator=torch.Generator("cuda").manual_seed(place), device="cuda")
        own.write(held, torch.arange(STATES, device="cuda"), values * 2.0**exponent)
    made.inputs[0].copy_(made.inputs[0].float() * 2.0**-exponent)
    check(made)


@pytest.mark.parametrize("rows", [4, 40, 300])
def test_a_key_that_is_nan_stays_in_its_rows(rows: int) -> None:
    """Rows that list it are NaN, all others are what they were."""
    made, before = call(DECODE, rows, full=True), call(DECODE, rows, full=True).run()[0].clone()
    row = torch.full((1, 512), float("nan"), device="cuda")
    slot = made.inputs[WINDOW_SLOTS][2, 5].view(1).long()
    pages_of(Format.FP8_DS_MLA, 512, 64, 64, torch.bfloat16).write(made.inputs[WINDOW_CACHE], slot, row)
    found = made.poison(0xFF).run()[0]
    struck = (made.inputs[WINDOW_SLOTS] == slot).any(1)
    assert struck[2]
    assert found[struck].isnan().all()
    assert same_bits(found[~struck], before[~struck])


@pytest.mark.parametrize("how", [{"extra": 3000}, {"extra": 3000, "splits": 7}, {"window": 1, "extra": 1}])
@pytest.mark.parametrize("rows", [5, 150])
def test_long_and_short_lists(rows: int, how: dict[str, Any]) -> None:
    check(call(DECODE, rows, **how))


@pytest.mark.parametrize("rows", [1, 12, 30, 64, 300])
def test_the_same_bits_again_and_again(rows: int) -> None:
    """However the blocks of a row come to their ends."""
    made = call(DECODE, rows, full=True)
    wanted = made.run()[0].clone()
    for _ in range(20):
        assert same_bits(made.poison(0xFF).run()[0], wanted)


@pytest.mark.parametrize("rows", [1, 8, 20, 64, 128])
def test_how_far_it_is_from_float64(rows: int) -> None:
    """Blocks that share a row send one another rounded sums: less than the output's own rounding once more."""
    made = call(DECODE, rows, full=True)
    wanted = made.reference(torch.float64)[0].double()
    found = made.poison(0xFF).run()[0].double()
    rounding = (wanted.bfloat16().double() - wanted).norm()
    assert (found - wanted).norm() <= 1.6 * rounding


@pytest.mark.parametrize("rows", [1, 20, 140, 400])
def test_prefill_rows_of_any_length(rows: int) -> None:
    made = call("sparse_attention_prefill", rows, listed=700)
    counts = torch.tensor([0, 1, 700, 64, 65, 0, 128, 30], dtype=torch.int32)
    made.inputs[3].copy_(counts[torch.arange(rows) % len(counts)])
    check(made)
