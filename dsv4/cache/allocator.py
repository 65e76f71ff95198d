"""Blocks of one group of caches."""

from __future__ import annotations

from collections.abc import Iterable

from dsv4.cache.errors import CacheFull
from dsv4.errors import RequestError


class BlockAllocator:
    """Hands out block numbers, last freed first, and refuses when there are too few.

    Parameters
    ----------
    name
        The group, for errors.
    blocks
        How many there are: numbers 0 to blocks - 1.

    Attributes
    ----------
    peak
        Most blocks that were taken at once.
    """

    def __init__(self, name: str, blocks: int) -> None:
        if blocks < 1:
            raise RequestError(f"cache group {name!r} has {blocks} blocks", "give it 1 or more")
        self.name = name
        self.blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._taken: set[int] = set()
        self.peak = 0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many blocks, or `CacheFull` and none."""
        if count > len(self._free):
            raise CacheFull(
                f"cache group {self.name!r} has {len(self._free)} of {self.blocks} blocks free, {count} are needed",
                "finish or cancel a request, or give the caches more memory",
                group=self.name,
                free=len(self._free),
                needed=count,
            )
        taken = [self._free.pop() for _ in range(count)]
        self._taken.update(taken)
        self.peak = max(self.peak, len(self._taken))
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Blocks that were taken, each once."""
        for block in blocks:
            if block not in self._taken:
                raise RequestError(f"block {block} of cache group {self.name!r} is not taken", "free each block once")
            self._taken.remove(block)
            self._free.append(block)
