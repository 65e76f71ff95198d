"""Byte layouts of cache pages: how states lie in them, written and read by slot.

A slot numbers the states of a cache: block = slot // block_size, offset = slot % block_size; -1 is skipped. Layouts are
those of vLLM's ``fp8_ds_mla`` cache (``cache_utils.py``, ``compressor.py``, ``kv_cache_interface.py``), and a plain one
for exact comparisons.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from typing import Protocol

import attrs
import torch

from dsv4.cache.errors import CacheError
from dsv4.cache.quantise import BIAS, FP8, Floor, dequantise_fp4, fp8_exponent, quantise_fp4, to_fp8


class Format(enum.IntEnum):
    """How a cache keeps its states; the numbers are what ops are passed."""

    PLAIN = 0
    """Rows of a float dtype: [blocks, block_size, width]."""
    FP8_DS_MLA = 1
    """FP8 with UE8M0 scales per 64 for the NoPE dims, bf16 for the RoPE dims: uint8 [blocks, stride]."""
    INDEXER_FP8 = 2
    """FP8 with one fp32 power-of-two scale a key: uint8 [blocks, stride]."""
    INDEXER_FP4 = 3
    """E2M1 with UE8M0 scales per 32: uint8 [blocks, stride]."""

    @classmethod
    def _missing_(cls, value: object) -> Format:
        raise CacheError(f"there is no format {value!r}", f"pass one of {', '.join(map(str, cls))}")


class Pages(Protocol):
    """The pages of one cache."""

    @property
    def block_size(self) -> int:
        """States of a page."""

    def allocate(self, blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A cache of zeros."""

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, rule: Floor = Floor.ABSMAX) -> None:
        """Store rows [N, width] at slots [N]; slots below 0 are skipped."""

    def read(self, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows [N, width] at slots [N], all valid, dequantised."""

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple not below the value."""
    return -(-value // multiple) * multiple


@attrs.frozen
class Plain:
    """Rows of a float dtype; whoever writes has rounded nothing before."""

    width: int
    block_size: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.width * self.dtype.itemsize

    def allocate(self, blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.zeros(blocks, self.block_size, self.width, dtype=self.dtype, device=device)

    def _check(self, cache: torch.Tensor) -> None:
        if cache.shape[1:] != (self.block_size, self.width):
            raise CacheError(
                f"a cache {tuple(cache.shape)} has no plain pages of {self.block_size} states of {self.width}",
                "pass [blocks, block size, width]",
            )

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, rule: Floor = Floor.ABSMAX) -> None:
        self._check(cache)
        block, offset, kept = split(slots, self.block_size)
        cache[block, offset] = rows[kept].to(cache.dtype)

    def read(self, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self._check(cache)
        slots = slots.long()
        return cache[slots // self.block_size, slots % self.block_size].to(dtype)


@attrs.frozen
class Region:
    """A part of a page: `width` bytes a state, from `start` on."""

    start: int
    width: int

    def of(self, cache: torch.Tensor, block_size: int) -> torch.Tensor:
        """Its bytes as a view, uint8 [blocks, block_size, width], which knows no bounds: see `check_packed`."""
        return cache.as_strided(
            (cache.shape[0], block_size, self.width),
            (cache.stride(0), self.width, 1),
            cache.storage_offset() + self.start,
        )


def check_packed(cache: torch.Tensor, pages: Pages, *regions: Region) -> None:
    """Raise `CacheError` if a cache of packed pages has no room for the regions of each, or is none."""
    if cache.dtype != torch.uint8 or cache.dim() != 2:
        raise CacheError(f"a cache {tuple(cache.shape)} of {cache.dtype} has no {pages}", "pass uint8 [blocks, bytes]")
    needed = max(region.start + pages.block_size * region.width for region in regions)
    if cache.stride(1) != 1 or cache.shape[1] < needed:
        raise CacheError(
            f"a page of {cache.shape[1]} bytes, {cache.stride(1)} apart, is too small for {pages}: {needed} are needed",
            "allocate it with dsv4.cache.pages; only the stride of pages is free",
        )


@attrs.frozen
class MLA:
    """``fp8_ds_mla``: a region of states, then one of scales.

    Parameters
    ----------
    nope, rope
        Dims of a state kept in FP8 (448) and in bf16 (64, its tail).
    """

    nope: int
    rope: int
    block_size: int

    @property
    def scales(self) -> Region:
        """One UE8M0 byte per 64 NoPE dims, padded with a zero byte to 8."""
        return Region(self.block_size * self.states.width, round_up(self.nope // 64 + 1, 8))

    @property
    def states(self) -> Region:
        return Region(0, self.nope + 2 * self.rope)

    @property
    def page_bytes(self) -> int:
        return round_up(self.block_size * (self.states.width + self.scales.width), self.states.width)

    def allocate(self, blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.zeros(blocks, self.page_bytes, dtype=torch.uint8, device=device)

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, rule: Floor = Floor.ABSMAX) -> None:
        check_packed(cache, self, self.states, self.scales)
        block, offset, kept = split(slots, self.block_size)
        # What is quantised is the bf16 value: the absolute maximum is taken after this rounding.
        rows = rows[kept].to(torch.bfloat16)
        groups = rows[:, : self.nope].float().unflatten(1, (-1, 64))
        power = fp8_exponent(groups.abs().amax(2), rule=rule)
        codes = to_fp8(groups, power[..., None]).flatten(1).view(torch.uint8)
        tail = rows[:, self.nope :].contiguous().view(torch.uint8)
        self.states.of(cache, self.block_size)[block, offset] = torch.cat((codes, tail), 1)
        scales = torch.zeros(len(rows), self.scales.width, dtype=torch.uint8, device=rows.device)
        scales[:, : self.nope // 64] = (power + BIAS).to(torch.uint8)
        self.scales.of(cache, self.block_size)[block, offset] = scales

    def read(self, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        check_packed(cache, self, self.states, self.scales)
        slots = slots.long()
        block, offset = slots // self.block_size, slots % self.block_size
        state = self.states.of(cache, self.block_size)[block, offset]
        scales = self.scales.of(cache, self.block_size)[block, offset][:, : self.nope // 64]
        codes = state[:, : self.nope].contiguous().view(FP8).to(dtype).unflatten(1, (-1, 64))
        values = torch.ldexp(codes, (scales.int() - BIAS)[..., None]).flatten(1)
        return torch.cat((values, state[:, self.nope :].contiguous().view(torch.bfloat16).to(dtype)), 1)


@attrs.frozen
class IndexerFP8:
    """Indexer keys in FP8: a region of keys, then one fp32 scale (a power of two) a key."""

    width: int
    block_size: int

    @property
    def keys(self) -> Region:
        return Region(0, self.width)

    @property
    def scales(self) -> Region:
        return Region(self.block_size * self.width, 4)

    @property
    def page_bytes(self) -> int:
        return round_up(self.block_size * (self.width + 4), PAGE_ALIGNMENT)

    def allocate(self, blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.zeros(blocks, self.page_bytes, dtype=torch.uint8, device=device)

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, rule: Floor = Floor.ABSMAX) -> None:
        check_packed(cache, self, self.keys, self.scales)
        block, offset, kept = split(slots, self.block_size)
        rows = rows[kept].to(torch.bfloat16).float()
        power = fp8_exponent(rows.abs().amax(1, keepdim=True), rule=rule)
        self.keys.of(cache, self.block_size)[block, offset] = to_fp8(rows, power).view(torch.uint8)
        scale = torch.ldexp(torch.ones_like(power, dtype=torch.float32), power)
        self.scales.of(cache, self.block_size)[block, offset] = scale.view(torch.uint8)

    def read(self, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        check_packed(cache, self, self.keys, self.scales)
        slots = slots.long()
        block, offset = slots // self.block_size, slots % self.block_size
        keys = self.keys.of(cache, self.block_size)[block, offset].contiguous().view(FP8).to(dtype)
        scales = self.scales.of(cache, self.block_size)[block, offset].contiguous().view(torch.float32).to(dtype)
        return keys * scales


@attrs.frozen
class IndexerFP4:
    """Indexer keys in MXFP4: a region of packed keys, then UE8M0 bytes, one per 32 dims."""

    width: int
    block_size: int

    @property
    def keys(self) -> Region:
        return Region(0, self.width // 2)

    @property
    def scales(self) -> Region:
        return Region(self.block_size * self.width // 2, self.width // 32)

    @property
    def page_bytes(self) -> int:
        return round_up(self.block_size * (self.keys.width + self.scales.width), PAGE_ALIGNMENT)

    def allocate(self, blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.zeros(blocks, self.page_bytes, dtype=torch.uint8, device=device)

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, rule: Floor = Floor.ABSMAX) -> None:
        check_packed(cache, self, self.keys, self.scales)
        block, offset, kept = split(slots, self.block_size)
        packed, scales = quantise_fp4(rows[kept].to(torch.bfloat16).float())
        self.keys.of(cache, self.block_size)[block, offset] = packed
        self.scales.of(cache, self.block_size)[block, offset] = scales

    def read(self, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        check_packed(cache, self, self.keys, self.scales)
        slots = slots.long()
        block, offset = slots // self.block_size, slots % self.block_size
        keys = self.keys.of(cache, self.block_size)[block, offset]
        return dequantise_fp4(keys, self.scales.of(cache, self.block_size)[block, offset], dtype)


PAGE_ALIGNMENT = 576
"""vLLM pads every page to a multiple of the ``fp8_ds_mla`` state, so that all groups share one pool."""


def split(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block and offset of the slots that are not skipped, and where those stand among the rows."""
    kept = (slots >= 0).nonzero().squeeze(1)
    chosen = slots[kept].long()
    return chosen // block_size, chosen % block_size, kept


@lru_cache(maxsize=256)
def pages_of(layout: Format, width: int, rope: int, block_size: int, dtype: torch.dtype = torch.float32) -> Pages:
    """The pages of a cache of that format.

    Parameters
    ----------
    width, rope
        Dims of a state, and how many of them, its tail, are rotated.
    dtype
        Of plain rows.

    Raises
    ------
    CacheError
        `block_size` is not above 0.
    """
    if type(block_size) is not int or block_size <= 0:
        raise CacheError(f"block_size={block_size!r}", "pass the states of a page, 1 or more")
    if layout is Format.FP8_DS_MLA:
        return MLA(width - rope, rope, block_size)
    if layout is Format.INDEXER_FP8:
        return IndexerFP8(width, block_size)
    if layout is Format.INDEXER_FP4:
        return IndexerFP4(width, block_size)
    return Plain(width, block_size, dtype)


@attrs.frozen
class States:
    """Compressor states: rows [kv | score + ape] of a page, then padding to `PAGE_ALIGNMENT` bytes.

    Parameters
    ----------
    width
        Columns of a row: twice the compressor's.
    block_size
        Rows of a page: 4 (C4, indexer) or 8 (C128).
    """

    width: int
    block_size: int
    dtype: torch.dtype = torch.float32

    @property
    def page_bytes(self) -> int:
        return round_up(self.block_size * self.width * self.dtype.itemsize, PAGE_ALIGNMENT)

    def allocate(self, blocks: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """States of zeros, [blocks, block_size, width], strided by the page."""
        stride = self.page_bytes // self.dtype.itemsize
        return torch.zeros(blocks, stride, dtype=self.dtype, device=device).as_strided(
            (blocks, self.block_size, self.width), (stride, self.width, 1)
        )
