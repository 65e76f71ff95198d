"""Seams: named places where one fence, edge or guard is taken out, so that a scenario can be seen to need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from workspace import sleep, source
from workspace.adaptors.guard import Guard
from workspace.adaptors.poison import Poison
from workspace.block import Block, Slab
from workspace.capture import Capture
from workspace.clocks import Clocks
from workspace.fork import Fork
from workspace.free import FreeBlocks
from workspace.holding import Holding, Pinnable
from workspace.lane import Lane
from workspace.layout import Layout
from workspace.lease import Lease
from workspace.pool import Pool
from workspace.simulated.access import AccessLog
from workspace.source import DriverSource
from workspace.staging import StagingSlot
from workspace.strategies.caching import Caching
from workspace.strategies.pooled import Pooled
from workspace.timeline import Timeline
from workspace.workspace import Workspace


@attrs.frozen
class Seam:
    """One guard.

    Attributes
    ----------
    guard
        What is removed, in words.
    places
        (owner, attribute, replacement) for each implementation of it.
    """

    guard: str
    places: tuple[tuple[Any, str, Any], ...]


def _nothing(*arguments: Any, **options: Any) -> None:
    """Does nothing."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **options: value


_join = Fork._join


def _unwaited(self: Fork, *arguments: Any) -> None:
    """The bookkeeping of a join, without the device hearing of it."""
    driver: Any = self._timeline.driver
    verbs = {name: getattr(driver, name) for name in ("record", "wait")}
    for name in verbs:
        setattr(driver, name, _nothing)
    try:
        _join(self, *arguments)
    finally:
        for name, verb in verbs.items():
            setattr(driver, name, verb)


def _handed_out_twice(self: Pool, block: Block, nbytes: int, home: int, at_end: bool = False) -> Block:
    twin = Block(block.slab, block.offset, nbytes)
    twin.home, twin.state = home, "taken"
    self.taken += nbytes
    return twin


def _removed_among_equals(self: FreeBlocks, block: Block) -> None:
    """Twins have the bounds of what they are twins of, which no free blocks share otherwise."""
    place = next(place for place, one in enumerate(self._blocks) if one is block)
    del self._keys[place], self._blocks[place]


def _alone(self: Pooled, request: Any, stream: Any) -> Block:
    self.growths += 1
    return self.pool.grow(request.nbytes, stream)


def _eager_self(self: Timeline, stream: Any, capture: Any) -> Any:
    return stream


_resolve = Layout._resolve


def _overlaid(self: Layout, *dims: Any) -> Any:
    resolved = _resolve(self, *dims)
    return attrs.evolve(resolved, extents=tuple(attrs.evolve(one, offset=0) for one in resolved.extents))


_lease = Workspace.lease


def _unzeroed(self: Workspace, layout: Any, /, *, zero: bool = False, **rest: Any) -> Any:
    return _lease(self, layout, **rest)


_at_base = classmethod(lambda cls, buffer: cls(buffer, 0, buffer.nbytes // 256 * 256))

SEAMS: dict[str, Seam] = {
    "fence": Seam(
        "the wait a block's next user makes for its last uses (of `caching`: record_stream, and the references "
        "a capture holds until the join)",
        ((Timeline, "fence", _always(0)), (Caching, "unordered", _always([]))),
    ),
    "order": Seam("the check that a block's last uses are ordered", ((Timeline, "ordered", _always(True)),)),
    "declare": Seam("the note that a stream uses a lease", ((Holding, "declare", _nothing),)),
    "use": Seam("a declaration by ws.use", ((Workspace, "use", _nothing),)),
    "join": Seam("the parent's wait for its branches", ((Fork, "_join", _unwaited),)),
    "branches": Seam("the branches of an open fork counting as users", ((Fork, "branches_of", _always(())),)),
    "until": Seam("the wait for a collective before its lease is released", ((Lease, "until", _nothing),)),
    "exclusive": Seam(
        "a block leaving the free ones when it is lent",
        (
            (Pool, "take", _handed_out_twice),
            (FreeBlocks, "remove", _removed_among_equals),
        ),
    ),
    "lane.enter": Seam("a replay's wait for the footprint's last uses", ((Lane, "enter", _nothing),)),
    "lane.leave": Seam("a replay becoming the footprint's last use", ((Lane, "leave", _nothing),)),
    "lane.begin": Seam("the refusal of replays that interleave in one lane", ((Lane, "begin", _nothing),)),
    "footprint": Seam("a graph's hold on the bytes captured in it", ((Lane, "in_use", property(_always(False))),)),
    "keep_held": Seam("a graph's hold on leases of before its capture", ((Capture, "keep_held", _nothing),)),
    "pin": Seam("a graph's hold on bytes declared used in its capture", ((Pinnable, "pin", _nothing),)),
    "rollback": Seam("what a failed capture claimed going back", ((Lane, "rollback", _nothing),)),
    "child timeline": Seam(
        "a capture's clocks being its own",
        (
            (Timeline, "captured_self", _eager_self),
            (Timeline, "forget", _nothing),
            (Fork, "_refuse_taken", _nothing),  # it takes an eager self that captures for another thread's doing
        ),
    ),
    "complete only": Seam(
        "a graph replayed unseen taking only bytes whose uses are over", ((Lane, "_claimable", _always(True)),)
    ),
    "exact": Seam("a use on a stream that may vanish recorded at once", ((Pooled, "_record", _nothing),)),
    "host order": Seam("what the host has seen complete", ((Clocks, "complete", _nothing),)),
    "offsets": Seam("each tensor of a layout having bytes of its own", ((Layout, "_resolve", _overlaid),)),
    "alignment": Seam("the first aligned byte of a slab", ((Slab, "over", _at_base),)),
    "lock": Seam("growth forbidden after lock()", ((Pooled, "lock", _nothing),)),
    "slots": Seam("all micro-batches growing together", ((Pooled, "_grow", _alone),)),
    "give up": Seam("idle slabs going back before the pool grows", ((DriverSource, "give_up", _always(False)),)),
    "pinned views": Seam("the list of views that keep an old slab", ((source, "pinned_owners", _always([])),)),
    "fence before growth": Seam(
        "a block in flight being waited for, and idle slabs going back",
        (
            (Pool, "pending", _always(None)),
            (Lease, "_from_another_shelf", _always(None)),
            (DriverSource, "give_up", _always(False)),
        ),
    ),
    "zero": Seam("the fill of a lease asked zero", ((Workspace, "lease", _unzeroed),)),
    "poison": Seam("the pattern in bytes nobody has written", ((Poison, "_fill", _nothing),)),
    "guard": Seam("the look at guard bands", ((Guard, "_damage", _always(None)),)),
    "process": Seam("the note that a child is another process", ((Timeline, "after_fork", _nothing),)),
    "staged": Seam("the wait for copies out of a staging slot", ((StagingSlot, "await_copies", _nothing),)),
    "sleep": Seam("slabs going back to the device", ((Pooled, "sleep", _always(0)),)),
    "remap": Seam("memory behind the addresses of slabs at the wake", ((DriverSource, "remap", _always(0)),)),
    "invalidate": Seam("the mark on a graph whose bytes a sleep takes", ((sleep, "_invalidate", _nothing),)),
    "replayable": Seam("the look for graphs that are replayed unseen", ((sleep, "_loses_addresses", _always(False)),)),
    "on loan": Seam("the look at what is on loan before a sleep", ((sleep, "_on_loan", _always(0)),)),
    "judge": Seam("the device's access log", ((AccessLog, "add", _nothing),)),
}


@contextmanager
def removed(name: str) -> Iterator[None]:
    """Take a guard out for a ``with`` block."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, attribute, replacement in SEAMS[name].places:
            before.append((owner, attribute, owner.__dict__[attribute]))
            setattr(owner, attribute, replacement)
        yield
    finally:
        for owner, attribute, value in reversed(before):
            setattr(owner, attribute, value)
