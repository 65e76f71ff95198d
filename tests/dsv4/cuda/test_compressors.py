"""Compressors where every row ends a group, and where windows begin before the first position."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.kernels.calls import EPS, _state, compressed, pooled, stored
from benchmarks.kernels.maker import Call, Maker, made, pages
from dsv4 import ops
from dsv4.cache.pages import Format
from tests.dsv4.cuda.check import bits, check, same_bits

ROWS = 203
"""Of several chunks, and no multiple of one."""
LAYOUTS = (Format.FP8_DS_MLA, Format.INDEXER_FP8, Format.INDEXER_FP4, Format.PLAIN)


def _decode_rows(m: Maker, ratio: int, requests: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, requests and slots of rows of which each ends a group of its own request, but every seventh."""
    row = torch.arange(ROWS, device=m.device)
    positions = (row * 37 % (256 // ratio) + 1) * ratio - 1
    slots = torch.randperm(ROWS, generator=m.generator, device=m.device).masked_fill(row % 7 == 3, -1)
    return positions, (row % requests).to(torch.int32), slots


def dense_pooling(m: Maker, ratio: int, overlap: bool, width: int) -> Call:
    state, table = _state(m, 9, width * (4 if overlap else 2), 8)
    positions, request, slots = _decode_rows(m, ratio, 9)
    return made(ops.pool_states, (state, table, positions, request, slots, ratio, overlap), D=width)


def dense_compression(m: Maker, layout: Format) -> Call:
    width = 512 if layout in (Format.FP8_DS_MLA, Format.PLAIN) else 128
    state, table = _state(m, 9, 4 * width, 4)
    positions, request, slots = _decode_rows(m, 4, 9)
    cache = pages(layout, ROWS + 64, 64, m.device, width)
    return made(ops.compress, (
        state, table, positions, request, slots, m.plain(width), m.cos_sin(), cache, 4, True, EPS, 64, int(layout),
    ))  # fmt: skip


def dense_storing(m: Maker, layout: Format) -> Call:
    call = stored(m, ROWS, layout, ratio=4, block=64)
    positions, _, slots = _decode_rows(m, 4, 9)
    return Call(call.op, (*call.inputs[:3], positions, slots, *call.inputs[5:]), call.outs)


def maker() -> Maker:
    return Maker("cuda", 0, "random")


@pytest.mark.parametrize(
    ("ratio", "overlap", "width"), [(128, False, 512), (4, True, 128), (64, True, 512), (256, False, 64)]
)
def test_pooling_where_every_row_ends_a_group(ratio: int, overlap: bool, width: int) -> None:
    """A block goes through many groups, one after the other; windows are shorter and longer than a tile."""
    check(dense_pooling(maker(), ratio, overlap, width))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.name)
def test_compression_where_every_row_ends_a_group(layout: Format) -> None:
    check(dense_compression(maker(), layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.name)
def test_storing_where_every_row_ends_a_group(layout: Format) -> None:
    check(dense_storing(maker(), layout))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Alone in its call, a row gets the same bits."""
    whole = dense_pooling(maker(), 128, False, 512).poison(0)
    whole.run()
    for row in (0, 5, ROWS - 1):
        rows = slice(row, row + 1)
        state, table, positions, request, slots, *rest = whole.inputs
        alone = made(whole.op, (state, table, positions[rows], request[rows], slots[rows], *rest), D=512)
        alone.run()
        assert same_bits(alone.outs[0][0], whole.outs[0][row])


@pytest.mark.parametrize("make", [compressed, pooled], ids=["compress", "pool_states"])
def test_what_blocks_held_before_does_not_reach_the_sum(make: Callable[[Maker, int], Call]) -> None:
    """After calls over NaN everywhere, windows that begin before the first position are what they were."""
    wanted = make(maker(), 257).poison(0)
    wanted.run()
    assert wanted.inputs[2].min() == 0  # such windows are there
    spoilt = make(maker(), 8192).copy()
    spoilt.inputs[0].fill_(float("nan"))
    found = make(maker(), 257).poison(0)
    spoilt.run()
    found.run()
    for one, other in zip(found.written(), wanted.written(), strict=True):
        assert torch.equal(bits(one), bits(other))
    assert spoilt.written()[0].view(torch.uint8).any()  # the first calls did run


def test_rows_without_slots_need_no_table() -> None:
    """Padding rows of a graph may come without a request; what is mutated stays."""
    call = compressed(maker(), 33)
    state, table, positions, request, slots, *rest = call.inputs
    spare = Call(call.op, (state, table[:0], positions, request, slots.fill_(-1), *rest), call.outs)
    before = [one.clone() for one in spare.written()]
    spare.run()
    torch.cuda.synchronize()
    assert all(same_bits(one, other) for one, other in zip(spare.written(), before, strict=True))


@pytest.mark.parametrize("layout", [Format.FP8_DS_MLA, Format.PLAIN], ids=lambda one: one.name)
def test_states_saved_by_the_kernel_before_are_waited_for(layout: Format) -> None:
    """Launches overlap, and compression lets its successor begin later than other kernels do.

    Fails without the wait in `await_predecessor` (csrc/dsv4/launch.cuh).
    """
    compress = compressed(maker(), 2048, layout)
    state, cache = compress.inputs[0], compress.inputs[7]
    rows, width = state.shape[0] * state.shape[1], state.shape[2]
    source, nothing = maker().plain(rows, width), torch.zeros(4, width // 2, device="cuda")
    place = torch.arange(rows, device="cuda")
    save = made(ops.save_partial_states, (source, nothing, place, place, state))

    def run(pause: Callable[[], None]) -> torch.Tensor:
        state.zero_(), cache.zero_()
        torch.cuda.synchronize()
        save.run()
        pause()
        compress.run()
        return cache.clone()

    wanted = run(torch.cuda.synchronize)
    for _ in range(20):
        assert same_bits(run(lambda: None), wanted)
