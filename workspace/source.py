"""Where a pool's slabs come from: the framework's allocator, or for a capture the lane's footprint."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Protocol

from workspace.block import Slab, pinned_owners
from workspace.errors import CapacityError
from workspace.layout import ALIGNMENT, round_up
from workspace.streams import Stream
from workspace.timeline import Timeline


class Source(Protocol):
    """Obtains and gives up slabs for one pool."""

    fixed: bool
    """Whether bytes can be obtained only from what a parent pool already holds."""

    def check(self, nbytes: int, idle: int) -> None:
        """Raise `CapacityError` if `nbytes` cannot be had even after `idle` bytes are given up."""

    def obtain(self, nbytes: int, stream: Stream) -> Slab:
        """A slab of at least `nbytes`; raises `CapacityError` and changes nothing when there is none."""

    def extend(self, slab: Slab, nbytes: int) -> int:
        """Make a slab up to `nbytes` longer in place; returns the bytes added, 0 when it cannot."""

    def release_cached(self) -> None:
        """Let the framework's allocator return what was given up to the device, where a larger slab can use it."""

    def give_up(self, slab: Slab) -> bool:
        """Give an idle slab back. False (nothing done) when its last uses cannot be seen complete now."""


class DriverSource:
    """Slabs as ordinary allocations of the framework's allocator, made outside captures."""

    fixed = False

    def __init__(self, timeline: Timeline, granularity: int, capacity: int | None) -> None:
        self.timeline = timeline
        self.granularity = granularity
        self.capacity = capacity
        self.held = 0
        self.peak = 0
        self.retired: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._serial = itertools.count()

    def check(self, nbytes: int, idle: int) -> None:
        kept = self.reserved - idle
        if self.capacity is not None and kept + nbytes > self.capacity:
            raise CapacityError(
                f"a slab of {nbytes} bytes does not fit: {kept} of capacity={self.capacity} bytes are in use",
                "raise `capacity`, or release leases first",
                asked=nbytes, held=kept, capacity=self.capacity, setting="capacity",
            )  # fmt: skip

    def obtain(self, nbytes: int, stream: Stream) -> Slab:
        self.check(nbytes, 0)
        wanted = round_up(nbytes, self.granularity)
        if self.capacity is not None:
            wanted = max(nbytes, min(wanted, self.capacity - self.reserved))
        slab = Slab.over(self.timeline.driver.alloc(wanted, stream.key))
        if slab.nbytes < nbytes:
            # The allocator's base was not aligned: ask for the slack too, once.
            slab = Slab.over(self.timeline.driver.alloc(wanted + ALIGNMENT, stream.key))
        self.held += slab.buffer.nbytes
        self.peak = max(self.peak, self.reserved)
        return slab

    def extend(self, slab: Slab, nbytes: int) -> int:
        return 0

    @property
    def reserved(self) -> int:
        return self.held + sum(nbytes for nbytes, _ in self.retired.values())

    def give_up(self, slab: Slab) -> bool:
        """Free a slab once the host has seen its last uses complete; a slab somebody still views is *retired*."""
        if not self.timeline.settle(slab.first):
            return False
        owners = tuple(pinned_owners(slab))
        buffer, nbytes = slab.buffer, slab.buffer.nbytes
        self.held -= nbytes
        serial = next(self._serial)
        self.retired[serial] = (nbytes, owners)
        weakref.finalize(buffer, _unretire, self.timeline.later, self.retired, serial)
        del slab.buffer, buffer
        self.timeline.drain()
        return True

    def release_cached(self) -> None:
        if not self.timeline.captures:
            self.timeline.driver.trim()


def _unretire(
    later: Callable[[Callable[[], None]], None], retired: dict[int, tuple[int, tuple[str, ...]]], key: int
) -> None:
    def forget() -> None:
        retired.pop(key, None)

    later(forget)
