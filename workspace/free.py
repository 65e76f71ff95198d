"""Free blocks by size: what a search looks through, and what every lease that is cut and coalesced changes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from workspace.block import Block

Key = tuple[int, int, int]


class FreeBlocks:
    """Free blocks of one sub-pool, smallest first, equals by address; `nbytes` of all of them.

    Two lists and `bisect`: a block enters and leaves in about a microsecond, a sorted container of many needs several.
    """

    __slots__ = ("_blocks", "_keys", "nbytes")

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._blocks: list[Block] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    @property
    def largest(self) -> int:
        """Bytes of the largest; 0 where there is none."""
        return self._keys[-1][0] if self._keys else 0

    def fitting(self, nbytes: int) -> list[Block]:
        """Those of at least so many bytes."""
        return self._blocks[bisect_left(self._keys, (nbytes, 0, 0)) :]

    def add(self, block: Block) -> None:
        key = _key(block)
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._blocks.insert(place, block)
        self.nbytes += block.nbytes

    def remove(self, block: Block) -> None:
        """Take a block out before its bounds change. Raises `ValueError` for one that is not among them."""
        key = _key(block)
        place = bisect_left(self._keys, key)
        if place == len(self._keys) or self._keys[place] != key or self._blocks[place] is not block:
            raise ValueError(f"{block!r} is not among the free blocks")
        del self._keys[place], self._blocks[place]
        self.nbytes -= block.nbytes


def _key(block: Block) -> Key:
    return block.nbytes, block.slab.address, block.offset
