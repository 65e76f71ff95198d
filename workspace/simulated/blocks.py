"""Blocks of the caching allocator and the pools they wait in (c10/cuda/CUDACachingAllocator.cpp)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sortedcontainers import SortedDict

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20


def round_size(nbytes: int) -> int:
    """Bytes a request occupies."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


def segment_size(size: int) -> int:
    """Bytes asked of the device for a block that no cached one can serve."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(eq=False, slots=True)
class Block:
    """Consecutive bytes of one segment, for one stream; `prev` and `next` are its neighbours there."""

    address: int
    size: int
    stream: int
    pool: Pool
    allocated: bool = False
    requested: int = 0
    tensor: bool = False
    """Whether a tensor owns it, so that ``record_stream`` on the tensor reaches it."""
    prev: Block | None = None
    next: Block | None = None
    uses: set[int] = field(default_factory=set)
    """Streams named by ``record_stream`` since the block was handed out."""
    events: int = 0
    """Events recorded at its free that are not complete."""

    def key(self) -> tuple[int, int, int]:
        return (self.stream, self.size, self.address)

    def whole(self) -> bool:
        """Whether the block is its segment."""
        return self.prev is None and self.next is None


class Pool:
    """Free blocks of one kind (small or large), ordered by stream, then size, then address.

    Parameters
    ----------
    small
        Whether it serves requests of at most 1 MiB.
    private
        The capture's pool it is part of, None for the default one.
    """

    def __init__(self, small: bool, private: PrivatePool | None = None) -> None:
        self.small = small
        self.private = private
        self._free: Any = SortedDict()

    def __len__(self) -> int:
        return len(self._free)

    def add(self, block: Block) -> None:
        self._free[block.key()] = block

    def remove(self, block: Block) -> None:
        del self._free[block.key()]

    def best(self, size: int, stream: int) -> Block | None:
        """The smallest free block of a stream that fits; the lowest address among equals."""
        index = self._free.bisect_left((stream, size, 0))
        if index == len(self._free):
            return None
        block = self._free.peekitem(index)[1]
        return block if block.stream == stream else None

    def whole_segments(self) -> list[Block]:
        return [block for block in self._free.values() if block.whole()]

    def splits(self, block: Block, size: int) -> bool:
        """Whether the rest of a block is worth keeping apart."""
        rest = block.size - size
        return rest >= MIN_BLOCK if self.small else rest > SMALL_SIZE


class PrivatePool:
    """Memory of one capture: blocks freed in it are reused in it only, until its graph is gone."""

    def __init__(self) -> None:
        self.small = Pool(True, self)
        self.large = Pool(False, self)
        self.users = 1
        self.segments = 0
