"""Every byte of a cache page, against an encoder that shares nothing with the one under test."""

from __future__ import annotations

import attrs
import pytest
import torch

from dsv4.cache.errors import CacheError
from dsv4.cache.pages import MLA, Format, IndexerFP4, IndexerFP8, Plain, States, pages_of
from dsv4.cache.quantise import Floor
from tests.dsv4.cache import encoder

FILL = 0xA5


def rows(width: int) -> torch.Tensor:
    """Ordinary rows of many magnitudes, then the edges of FP8 and UE8M0."""
    torch.manual_seed(width)
    plain = torch.randn(12, width) * torch.logspace(-6, 4, 12)[:, None]
    edges = torch.zeros(10, width)
    edges[1] = -0.0
    edges[2, ::3] = 448.0  # the largest value, scale 1
    edges[3, ::5] = 449.0  # rounds to 450 in bf16: the next scale
    edges[4] = torch.linspace(-448, 448, width)
    edges[5, 0], edges[5, 1:] = 448.0, 2.0**-10  # half of the smallest subnormal: ties to zero
    edges[6, 0], edges[6, 1:] = 448.0, 3 * 2.0**-10  # ties to the even subnormal
    edges[7] = 0.02734375  # absmax 448 * 2**-14, the last where the floor rules differ
    edges[8] = 0.0275
    edges[9] = 3.0e38
    edges[9, 1::2] = -1e-38
    return torch.cat((plain, edges))


def filled(pages: MLA | IndexerFP8 | IndexerFP4, blocks: int) -> torch.Tensor:
    return torch.full((blocks, pages.page_bytes), FILL, dtype=torch.uint8)


def slots_of(count: int, block_size: int, blocks: int) -> torch.Tensor:
    slots = torch.randperm(blocks * block_size)[:count]
    slots[3] = -1
    return slots


@pytest.mark.parametrize("block_size", (64, 2))
@pytest.mark.parametrize("rule", tuple(Floor))
def test_an_mla_page_holds_the_encoders_bytes_and_nothing_else_changes(block_size: int, rule: Floor) -> None:
    """States, scales with their zero byte, -1 skipped, padding untouched."""
    pages = MLA(448, 64, block_size)
    values, blocks = rows(512), -(-24 // block_size)
    slots = slots_of(len(values), block_size, blocks)
    cache = filled(pages, blocks)
    wanted = [bytearray([FILL]) * pages.page_bytes for _ in range(blocks)]
    for slot, row in zip(slots.tolist(), values.tolist(), strict=True):
        if slot >= 0:
            page, at = wanted[slot // block_size], slot % block_size
            state, scales = encoder.mla_state(row, scale_floor=rule is Floor.SCALE)
            page[at * 576 : at * 576 + 576] = state
            start = block_size * 576 + at * 8
            page[start : start + 8] = scales
    pages.write(cache, slots, values, rule)
    assert [bytes(page.tolist()) for page in cache] == [bytes(page) for page in wanted]


def test_the_floor_rules_differ_only_up_to_the_stated_absmax() -> None:
    """Bytes 105 and 114 for zeros; equal from just above 448 * 2**-14 on."""
    scales = {}
    for rule in Floor:
        pages = MLA(448, 64, 2)
        cache = pages.allocate(2)
        values = torch.zeros(3, 512)
        values[1], values[2] = 0.02734375, 0.0275
        pages.write(cache, torch.tensor([0, 1, 2]), values, rule)
        scales[rule] = [pages.scales.of(cache, 2)[slot // 2, slot % 2, 0].item() for slot in range(3)]
    assert scales == {Floor.ABSMAX: [105, 113, 114], Floor.SCALE: [114, 114, 114]}


def test_an_indexer_fp8_page_holds_the_encoders_bytes() -> None:
    """Keys, then one fp32 power of two each."""
    pages, values = IndexerFP8(128, 64), rows(128)
    slots = slots_of(len(values), 64, 2)
    cache = filled(pages, 2)
    wanted = [bytearray([FILL]) * pages.page_bytes for _ in range(2)]
    for slot, row in zip(slots.tolist(), values.tolist(), strict=True):
        if slot >= 0:
            page, at = wanted[slot // 64], slot % 64
            page[at * 128 : at * 128 + 128], page[8192 + at * 4 : 8196 + at * 4] = encoder.indexer_fp8_key(row)
    pages.write(cache, slots, values)
    assert [bytes(page.tolist()) for page in cache] == [bytes(page) for page in wanted]


def test_an_indexer_fp4_page_holds_the_encoders_bytes() -> None:
    """Packed E2M1 with the even element low, then UE8M0 bytes; -0 keeps its sign, midpoints go to the even code."""
    pages = IndexerFP4(128, 64)
    values = torch.cat((rows(128), torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 16)[None]))
    values = torch.cat((values, -values[-1:], torch.full((1, 128), 2.0**-130)))
    slots = slots_of(len(values), 64, 2)
    cache = filled(pages, 2)
    wanted = [bytearray([FILL]) * pages.page_bytes for _ in range(2)]
    for slot, row in zip(slots.tolist(), values.tolist(), strict=True):
        if slot >= 0:
            page, at = wanted[slot // 64], slot % 64
            page[at * 64 : at * 64 + 64], page[4096 + at * 4 : 4100 + at * 4] = encoder.fp4_row(row)
    pages.write(cache, slots, values)
    assert [bytes(page.tolist()) for page in cache] == [bytes(page) for page in wanted]


def test_the_encoder_tells_wrong_bytes() -> None:
    """Control: with the other floor rule the same comparison fails."""
    row = torch.full((512,), 0.001)
    cache = MLA(448, 64, 2).allocate(1)
    MLA(448, 64, 2).write(cache, torch.tensor([0]), row[None], Floor.SCALE)
    state, scales = encoder.mla_state(row.tolist(), scale_floor=False)
    assert bytes(cache[0, :576].tolist()) != state
    assert bytes(cache[0, 1152:1160].tolist()) != scales


def test_page_strides_are_those_of_the_served_caches() -> None:
    """Bytes from page to page (dsv4.md, section 3)."""
    assert MLA(448, 64, 64).page_bytes == 37440
    assert MLA(448, 64, 2).page_bytes == 1728
    assert IndexerFP8(128, 64).page_bytes == 8640
    assert IndexerFP4(128, 64).page_bytes == 4608
    assert [States(width, block).page_bytes for width, block in ((2048, 4), (1024, 8), (512, 4))] == [
        32832, 32832, 8640,
    ]  # fmt: skip
    state = States(2048, 4).allocate(3)
    assert state.shape == (3, 4, 2048) and state.stride(0) * 4 == 32832


@pytest.mark.parametrize("kind", tuple(Format))
def test_what_is_read_is_within_the_formats_rounding_of_what_was_written(kind: Format) -> None:
    """FP8 keeps 4 bits of a value, FP4 2 relative to its block's largest; plain rows are exact."""
    width, rope = (512, 64) if kind in (Format.PLAIN, Format.FP8_DS_MLA) else (128, 64)
    torch.manual_seed(0)
    pages, values = pages_of(kind, width, rope, 64), torch.randn(50, width)
    cache = pages.allocate(1)
    pages.write(cache, torch.arange(50), values)
    found = pages.read(cache, torch.arange(50, dtype=torch.int32), torch.float32)
    if kind is Format.PLAIN:
        assert torch.equal(found, values)
    else:
        bound = values.abs() / 4 + values.abs().amax() / 4 if kind is Format.INDEXER_FP4 else values.abs() / 14 + 1e-2
        assert ((found - values).abs() <= bound).all()
        assert not torch.equal(found, values)


def test_plain_rows_may_be_of_any_float_dtype() -> None:
    """bf16 rows are rounded once, float64 rows not at all."""
    values = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float64):
        pages = Plain(8, 2, dtype)
        cache = pages.allocate(2)
        pages.write(cache, torch.arange(4), values)
        assert torch.equal(cache.flatten(0, 1), values.to(dtype))


PACKED = [MLA(448, 64, 4), IndexerFP8(128, 4), IndexerFP4(128, 4)]


@pytest.mark.parametrize("pages", PACKED, ids=lambda pages: type(pages).__name__)
@pytest.mark.parametrize("wrong", ["a byte short", "no scales", "float", "flat", "strided", "more states"])
def test_a_cache_that_has_no_such_pages_is_refused_untouched(pages: MLA | IndexerFP8 | IndexerFP4, wrong: str) -> None:
    """A view of a pool that two groups share: what is beside it is neither written nor read."""
    first = pages.states if isinstance(pages, MLA) else pages.keys
    needed = pages.scales.start + 4 * pages.scales.width
    pool = torch.full((8, 8 * pages.page_bytes), FILL, dtype=torch.uint8)
    cache = {
        "a byte short": pool[:, : needed - 1],
        "no scales": pool[:, : 4 * first.width],
        "float": torch.zeros(8, needed),
        "flat": pool.view(-1),
        "strided": pool[:, ::2],
        "more states": pool[:, :needed],
    }[wrong]
    if wrong == "more states":
        pages = attrs.evolve(pages, block_size=8)
    width = 512 if isinstance(pages, MLA) else 128
    slots = torch.tensor([0, 3, 5])
    with pytest.raises(CacheError) as caught:
        pages.write(cache, slots, torch.ones(3, width))
    assert caught.value.remedy
    with pytest.raises(CacheError):
        pages.read(cache, slots, torch.float32)
    assert (pool == FILL).all()


def test_the_smallest_page_that_has_room_is_taken() -> None:
    """Padding is not asked for, and nothing beside the page changes."""
    for pages in PACKED:
        needed = pages.scales.start + 4 * pages.scales.width
        pool = torch.full((8, needed + 1), FILL, dtype=torch.uint8)
        values = torch.ones(32, 512 if isinstance(pages, MLA) else 128)
        pages.write(pool[:, :needed], torch.arange(32), values)
        assert (pool[:, needed:] == FILL).all()
        assert torch.equal(pages.read(pool[:, :needed], torch.arange(32), torch.float32), values)


@pytest.mark.parametrize("shape", [(8, 4, 64), (8, 8, 32), (8, 32)])
def test_plain_pages_have_their_shape(shape: tuple[int, ...]) -> None:
    """Else slots would name other states than those that were meant."""
    pages, cache = Plain(32, 4, torch.float32), torch.zeros(shape)
    with pytest.raises(CacheError, match="no plain pages"):
        pages.write(cache, torch.tensor([1]), torch.ones(1, 32))
    with pytest.raises(CacheError, match="no plain pages"):
        pages.read(cache, torch.tensor([1]), torch.float32)
    assert not cache.any()


def test_formats_and_block_sizes_are_what_there_is() -> None:
    """By value, with what may be passed."""
    with pytest.raises(CacheError, match="no format 9"):
        Format(9)
    for block_size in (0, -4, 2.0, True):
        with pytest.raises(CacheError, match="block_size="):
            pages_of(Format.PLAIN, 128, 0, block_size)  # type: ignore[arg-type]
