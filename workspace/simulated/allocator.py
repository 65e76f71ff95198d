"""The device's caching allocator, true to torch's default rules (c10/cuda/CUDACachingAllocator.cpp).

A freed block is at once free for its own stream again: nothing here knows which stream used it, unless
``record_stream`` said so. That is the rule model code has to live with, and what use-after-free tests need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workspace.errors import OutOfMemory
from workspace.simulated.blocks import SMALL_SIZE, Block, Pool, PrivatePool, round_size, segment_size
from workspace.simulated.statistics import Statistics

if TYPE_CHECKING:
    from workspace.simulated.events import Stamp
    from workspace.simulated.storage import Storage


class CachingAllocator:
    """Blocks of segments, per stream, split and coalesced. Called with the device's lock held."""

    def __init__(self, device: Storage) -> None:
        self._device = device
        self._small = Pool(True)
        self._large = Pool(False)
        self._live: dict[int, Block] = {}
        self._pending: dict[int, deque[tuple[Stamp, Block]]] = {}
        self._after_captures: list[Block] = []
        self._released: list[PrivatePool] = []
        self.dying: deque[Block | PrivatePool] = deque()
        self.statistics = Statistics()

    def alloc(self, nbytes: int, stream: int, private: PrivatePool | None = None) -> Block:
        """A block of at least `nbytes` for use on `stream`. Raises `OutOfMemory`."""
        self.bury()
        self._collect()
        size = round_size(nbytes)
        pool = self._pool(size, private)
        block = pool.best(size, stream)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grow(size, stream, pool, nbytes)
        if pool.splits(block, size):
            self._split(block, size)
        block.allocated = True
        block.requested = nbytes
        self._live[block.address] = block
        self.statistics.allocate(block.size, nbytes)
        return block

    def free(self, block: Block) -> None:
        """Back to the pool; with recorded uses, once events recorded now on those streams are complete."""
        block.allocated = False
        del self._live[block.address]
        self.statistics.free(block.size, block.requested)
        if not block.uses:
            self._reclaim(block)
        elif self._device.captures:
            self._after_captures.append(block)  # an event recorded now would be part of a capture
        else:
            self._stamp(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note a use of a live block on another stream."""
        if stream != block.stream:
            block.uses.add(stream)

    def at(self, address: int) -> Block | None:
        """The live block that begins at an address."""
        self.bury()
        return self._live.get(address)

    def live(self) -> Iterator[Block]:
        """Blocks that are handed out."""
        return iter(self._live.values())

    def bury(self) -> None:
        """Free what finalisers left behind."""
        while self.dying:
            gone = self.dying.popleft()
            if isinstance(gone, PrivatePool):
                self.release_pool(gone)
            else:
                self.free(gone)

    def empty_cache(self) -> None:
        """Return unused segments to the device (``torch.cuda.empty_cache``); it waits for pending events."""
        self.bury()
        if not self._device.captures:
            for line in self._pending.values():
                for stamp, _ in line:
                    self._device.await_stamp(stamp)
            self._collect()
            self._release(self._small)
            self._release(self._large)
        for private in list(self._released):
            self._release(private.small)
            self._release(private.large)
            if not private.segments:
                self._released.remove(private)

    def release_pool(self, private: PrivatePool) -> None:
        """A graph let go of its pool; its free segments return at the next `empty_cache`."""
        private.users -= 1
        if not private.users and private.segments:
            self._released.append(private)

    def captures_over(self) -> None:
        """The last capture in progress ended: record the events that were put off."""
        waiting, self._after_captures = self._after_captures, []
        for block in waiting:
            self._stamp(block)

    def _pool(self, size: int, private: PrivatePool | None) -> Pool:
        small = size <= SMALL_SIZE
        if private is not None:
            return private.small if small else private.large
        return self._small if small else self._large

    def _grow(self, size: int, stream: int, pool: Pool, nbytes: int) -> Block:
        wanted = segment_size(size)
        try:
            address = self._device.cuda_malloc(wanted)
        except OutOfMemory:
            self.empty_cache()
            try:
                address = self._device.cuda_malloc(wanted)
            except OutOfMemory as error:
                error.fields.update(self.statistics.snapshot(), request=nbytes)
                raise
        self.statistics.reserve(wanted)
        if pool.private is not None:
            pool.private.segments += 1
        return Block(address, wanted, stream, pool)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.stream, block.pool)
        rest.prev, rest.next = block, block.next
        if block.next is not None:
            block.next.prev = rest
        block.next, block.size = rest, size
        block.pool.add(rest)

    def _stamp(self, block: Block) -> None:
        uses, block.uses = sorted(block.uses), set()
        for stream in uses:
            stamp = self._device.stamp(stream)
            if stamp is not None:
                block.events += 1
                self._device.counters["allocator_record"] += 1
                self._pending.setdefault(stream, deque()).append((stamp, block))
        if not block.events:
            self._reclaim(block)

    def _collect(self) -> None:
        """Take back blocks whose events are complete; per stream the oldest event first, as torch polls."""
        if self._device.captures:
            return
        for stream in list(self._pending):
            line = self._pending[stream]
            while line:
                stamp, block = line[0]
                self._device.counters["allocator_query"] += 1
                if not self._device.reached(stamp):
                    break
                line.popleft()
                self._device.settle(block.address, block.size, stamp)
                block.events -= 1
                if not block.events:
                    self._reclaim(block)
            if not line:
                del self._pending[stream]

    def _reclaim(self, block: Block) -> None:
        """Join a block with free neighbours and put it into its pool."""
        for side in (block.prev, block.next):
            if side is None or side.allocated or side.events or side.uses:
                continue
            block.pool.remove(side)
            if side is block.prev:
                block.address, block.prev = side.address, side.prev
                if side.prev is not None:
                    side.prev.next = block
            else:
                block.next = side.next
                if side.next is not None:
                    side.next.prev = block
            block.size += side.size
        block.pool.add(block)

    def _release(self, pool: Pool) -> None:
        for block in pool.whole_segments():
            pool.remove(block)
            self._device.cuda_free(block.address)
            self.statistics.unreserve(block.size)
            if pool.private is not None:
                pool.private.segments -= 1
