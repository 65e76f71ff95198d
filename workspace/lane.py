"""Lanes: footprints that graphs share because their replays never interleave."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import attrs

from workspace.block import Block, Slab, Uses, size_of
from workspace.errors import CapacityError, CaptureError, FootprintBusy
from workspace.streams import Event, Stream
from workspace.timeline import Timeline

if TYPE_CHECKING:
    from workspace.driver import Graph as DriverGraph
    from workspace.graph import Graph
    from workspace.pool import Pool


class Parent(Protocol):
    """A strategy with a pool, which a lane takes blocks out of."""

    pool: Pool


@attrs.frozen
class Mark:
    """A lane at the beginning of a capture: which capture it was, whether the only open one, and the region sizes."""

    serial: int
    alone: bool
    regions: dict[int, int]


class Lane:
    """The footprint of all graphs of one lane: blocks taken out of a pool for as long as one of them exists.

    The footprint has last uses of its own, so that a replay compares a few integers whatever the number of blocks.

    Attributes
    ----------
    parent
        The strategy it belongs to; None for one without a pool, whose graphs still never interleave.
    regions
        Blocks of the parent pool; their addresses stay valid until the last graph is released.
    uses, events
        Last uses of any byte of the footprint: those its blocks had in the pool, then replays and eager breaks.
    graphs, captures
        How many of them the footprint must outlive.
    members
        Its graphs: the framework's allocator keeps one private pool for all of them.
    replaying
        The graph whose replay has begun and not ended.
    complete_only
        A graph may be replayed without the library's knowledge: only bytes whose uses the host has seen complete.
    """

    def __init__(self, timeline: Timeline, name: str, parent: Parent | None, *, complete_only: bool = False) -> None:
        self.timeline = timeline
        self.name = name
        self.parent = parent
        self.complete_only = complete_only
        self.regions: list[Block] = []
        self.uses: Uses = {}
        self.events: dict[int, Event] | None = None
        self.graphs = 0
        self.captures = 0
        self.begun = 0
        self.members: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.replaying: Graph | None = None

    def shared(self) -> DriverGraph | None:
        """A graph of the lane, whose private pool of the framework's allocator the next one uses too."""
        return next((found for graph in self.members if (found := graph.driver_graph()) is not None), None)

    @property
    def in_use(self) -> bool:
        return bool(self.graphs or self.captures)

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self.regions)

    # -- bytes -----------------------------------------------------------------------------------------------
    @property
    def _pool(self) -> Pool:
        if self.parent is None:
            raise CaptureError(f"lane {self.name!r} belongs to a strategy without a pool")
        return self.parent.pool

    def claim(self, nbytes: int) -> Block:
        """Take a block out of the parent pool. Raises `CaptureError` ("reserve first"): a capture allocates nothing."""
        pool = self._pool
        pool.consolidate()
        runs = [run for run in pool.runs(self._claimable) if size_of(run) >= nbytes]
        if not runs:
            raise CaptureError(
                f"lane {self.name!r} needs {nbytes} bytes more inside a capture, and no block of the pool is "
                + ("large enough and seen complete by the host" if self.complete_only else "large enough"),
                "reserve first: declare the captured layouts with lane=..., call reserve() before the capture"
                + (", and synchronize" if self.complete_only else ""),
                lane=self.name, asked=nbytes, reserved=sum(slab.nbytes for slab in pool.slabs),
            )  # fmt: skip
        # The largest, so that the footprint can be lengthened in place when a larger bucket follows.
        block = pool.claim(max(runs, key=size_of), nbytes)
        self._take_over(block)
        self.regions.append(block)
        return block

    def lengthen(self, region: Block, nbytes: int) -> bool:
        """Add the free bytes behind a region, if there are enough."""
        pool = self._pool
        pool.consolidate()
        if not pool.claim_next(region, nbytes, self._claimable):
            return False
        self._take_over(region)
        return True

    def _claimable(self, block: Block) -> bool:
        return not self.complete_only or self.timeline.complete(block)

    def _take_over(self, block: Block) -> None:
        for used, epoch in block.uses.items():
            if self.uses.get(used, 0) < epoch:
                self.uses[used] = epoch
                event = block.events.get(used) if block.events else None
                self.events = {**(self.events or {})}
                self.events.pop(used, None)
                if event is not None:
                    self.events[used] = event
        block.uses, block.events = {}, None

    def begin_capture(self) -> Mark:
        """A capture begins to lease from the footprint; returns what `rollback` needs."""
        self.captures += 1
        self.begun += 1
        alone = self.captures == 1
        return Mark(self.begun, alone, {id(region): region.nbytes for region in self.regions})

    def rollback(self, mark: Mark) -> None:
        """Return to the pool what a failed capture claimed.

        Where another capture of the lane was open meanwhile it may lease the same bytes: they stay, and go back with
        the lane's last graph.
        """
        if not mark.alone or self.begun != mark.serial:
            return
        before = mark.regions
        for region in list(self.regions):
            nbytes = before.get(id(region), 0)
            if nbytes == region.nbytes:
                continue
            rest = region.split(nbytes) if nbytes else region
            if not nbytes:
                self.regions.remove(region)
            self._hand_back(rest)

    def _hand_back(self, block: Block) -> None:
        block.uses = dict(self.uses)
        block.events = dict(self.events) if self.events else None
        self._pool.restore(block)

    # -- order -----------------------------------------------------------------------------------------------
    def enter(self, stream: Stream) -> None:
        """Make the stream's next work come after every last use of the footprint."""
        self.timeline.fence(self._as_block(), stream)

    def leave(self, uses: Uses) -> None:
        """The footprint's last uses are these: they come after all that `enter` waited for.

        What another capture of the lane took over since stays, with its events.
        """
        ordered = self.timeline.clocks.ordered
        stream = next(iter(uses))
        for used, epoch in self.uses.items():
            if used not in uses and not ordered(stream, used, epoch):
                uses[used] = epoch
        kept = {used: event for used, event in (self.events or {}).items() if used in uses}
        self.uses = uses
        self.events = {**kept, **(self.timeline.exact_events({stream: uses[stream]}) or {})} or None

    def _as_block(self) -> Block:
        block = Block.__new__(Block)
        block.uses, block.events = self.uses, self.events
        return block

    def begin(self, graph: Graph) -> None:
        """A replay begins. Raises `FootprintBusy`: graphs share a lane only if whole replays never interleave."""
        if self.replaying is not None:
            raise FootprintBusy(
                f"a replay of lane {self.name!r} has begun and not ended",
                "give graphs whose replays interleave different lanes: ws.capture(lane=...)",
                lane=self.name,
            )
        self.replaying = graph

    def end(self) -> None:
        self.replaying = None

    # -- release ---------------------------------------------------------------------------------------------
    def drop_graph(self) -> None:
        """A graph is gone; with the last one the footprint returns to the pool."""
        self.graphs -= 1
        self.give_back_if_unused()

    def give_back_if_unused(self) -> None:
        """Return the footprint to the pool, with its last uses, once no graph and no open capture needs it."""
        if self.in_use or self.replaying is not None:
            return
        for region in self.regions:
            self._hand_back(region)
        self.regions, self.uses, self.events = [], {}, None


def end_use(lanes: list[Lane], uses: Uses) -> BaseException | None:
    """A replay or an eager break has ended: it is the last use of every footprint.

    Returns what went wrong on the device meanwhile: a use that gets no event of its own is one all the same, and ends.
    """
    failed: BaseException | None = None
    for lane in lanes:
        try:
            lane.leave(dict(uses))
        except BaseException as error:
            failed = failed or error
        finally:
            lane.end()
    return failed


class Lanes(dict[str, Lane]):
    """The lanes of one strategy, by name; a lane that no graph uses any more is begun anew."""

    def __init__(self, timeline: Timeline, parent: Parent | None) -> None:
        super().__init__()
        self._timeline = timeline
        self._parent = parent

    def of(self, name: str, *, complete_only: bool) -> Lane:
        """The lane of that name; see `workspace.WorkspaceProvider.lane`."""
        lane = self.get(name)
        if lane is None or not lane.in_use:
            lane = self[name] = Lane(self._timeline, name, self._parent, complete_only=complete_only)
        return lane

    def under_way(self) -> list[str]:
        """Names of lanes with an open capture, or a replay that has begun."""
        return sorted(name for name, lane in self.items() if lane.captures or lane.replaying is not None)

    def pinned(self) -> dict[str, int]:
        """Bytes of each lane that graphs or open captures pin."""
        return {name: lane.nbytes for name, lane in self.items() if lane.in_use}


class LaneSource:
    """A capture's slabs: the regions of its lane, which it may add to but never frees."""

    fixed = True

    def __init__(self, lane: Lane) -> None:
        self.lane = lane

    def slabs(self) -> list[Slab]:
        """The footprint as it is, all of it free: inside a new capture nothing has been used yet."""
        return [self._over(region) for region in self.lane.regions]

    def check(self, nbytes: int, idle: int) -> None:
        """`obtain` itself changes nothing when it refuses."""

    def obtain(self, nbytes: int, stream: Stream) -> Slab:
        return self._over(self.lane.claim(nbytes))

    def extend(self, slab: Slab, nbytes: int) -> int:
        if slab.outer is None:
            raise CapacityError("a slab of a capture has no region behind it")
        return nbytes if self.lane.lengthen(slab.outer, nbytes) else 0

    def release_cached(self) -> None:
        """Nothing of a lane is ever given up by a capture."""

    def give_up(self, slab: Slab) -> bool:
        return False

    def reclaim(self) -> None:
        """Nothing was given up."""

    @staticmethod
    def _over(region: Block) -> Slab:
        outer = region.slab
        return Slab(outer.buffer, outer.start + region.offset, region.nbytes, region)
