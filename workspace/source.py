"""Where a pool's slabs come from: the framework's allocator, or for a capture the lane's footprint."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Protocol, cast

from workspace.block import Slab, pinned_owners
from workspace.driver import Buffer, Mapping
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

    def reclaim(self) -> None:
        """After slabs were given up: let their memory go as far as nobody views it."""


class DriverSource:
    """Slabs as ordinary allocations of the framework's allocator, made outside captures.

    Attributes
    ----------
    restorable
        Slabs come straight from the device instead, and their addresses can do without memory for a while.
    viewed
        Owners of the views for whose sake slabs keep their memory meanwhile.
    """

    fixed = False

    def __init__(self, timeline: Timeline, granularity: int, capacity: int | None, restorable: bool = False) -> None:
        self.timeline = timeline
        self.granularity = granularity
        self.capacity = capacity
        self.restorable = restorable
        self.viewed: tuple[str, ...] = ()
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
        slab = Slab.over(self._allocate(wanted, stream))
        if slab.nbytes < nbytes:
            # The allocator's base was not aligned: ask for the slack too, once.
            slab = Slab.over(self._allocate(wanted + ALIGNMENT, stream))
        self.held += slab.buffer.nbytes
        self.peak = max(self.peak, self.reserved)
        return slab

    def _allocate(self, nbytes: int, stream: Stream) -> Buffer:
        driver = self.timeline.driver
        if self.restorable:
            return self.timeline.call(driver.map, nbytes)
        return self.timeline.call(driver.alloc, nbytes, stream.key)

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
        buffer = slab.buffer
        nbytes = buffer.nbytes if not self.restorable or _mapping(slab).mapped else 0
        self.held -= nbytes
        serial = next(self._serial)
        self.retired[serial] = (nbytes, owners)
        weakref.finalize(buffer, _unretire, self.timeline.later, self.retired, serial)
        del slab.buffer, buffer
        return True

    def reclaim(self) -> None:
        if self.restorable:
            self.timeline.call(self.timeline.driver.reclaim)
        self.timeline.drain()

    def pinned(self) -> tuple[str, ...]:
        """Owners of the views that keep memory."""
        return tuple(sorted({*self.viewed, *(owner for _, owners in self.retired.values() for owner in owners)}))

    # -- sleep -----------------------------------------------------------------------------------------------
    def unmap(self, slabs: list[Slab]) -> int:
        """Take the memory from behind slabs, except those that somebody still views; returns the bytes.

        The device must be idle.
        """
        owners = [pinned_owners(slab) for slab in slabs]
        self.viewed = tuple(sorted({owner for some in owners for owner in some}))
        given = 0
        for slab, some in zip(slabs, owners, strict=True):
            if not some and slab.has_memory():
                _mapping(slab).unmap()
                self.held -= slab.buffer.nbytes  # one by one: the next may fail
                given += slab.buffer.nbytes
        return given

    def remap(self, slabs: list[Slab]) -> int:
        """Put memory behind slabs again; returns the bytes. Where it fails, those before have theirs."""
        taken = 0
        for slab in slabs:
            if not slab.has_memory():
                _mapping(slab).remap()
                self.held += slab.buffer.nbytes
                taken += slab.buffer.nbytes
        self.viewed = ()
        return taken

    def release_cached(self) -> None:
        if not self.timeline.captures:
            self.timeline.call(self.timeline.driver.trim)


def _mapping(slab: Slab) -> Mapping:
    return cast(Mapping, slab.buffer)


def _unretire(
    later: Callable[[Callable[[], None]], None], retired: dict[int, tuple[int, tuple[str, ...]]], key: int
) -> None:
    def forget() -> None:
        retired.pop(key, None)

    later(forget)
