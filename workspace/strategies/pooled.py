"""What the strategies with a pool share: everything but whose blocks a request may take, and in what order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from workspace.block import Block, Uses
from workspace.config import WorkspaceConfig
from workspace.errors import CapacityError, CaptureError
from workspace.explain import call_site
from workspace.lane import Lane, Lanes, LaneSource
from workspace.layout import MAX_BYTES, Layout
from workspace.pool import LARGE, Home, Pool, named
from workspace.provider import Held, Homes
from workspace.refit import refit
from workspace.request import Request
from workspace.source import DriverSource, Source
from workspace.streams import Stream
from workspace.timeline import Timeline


class Pooled:
    """A pool of blocks under the one rule.

    Subclasses say which sub-pool a stream is at home in (`home`) and which blocks of other homes it may take
    (`elsewhere`). A block that is ordered comes first; then what ``policy`` names, in its order, where growth comes
    before a fence as long as fewer than ``in_flight`` requests' worth of bytes wait for other streams; then refusal.
    """

    name: ClassVar[str]
    safe: ClassVar[bool] = True
    lends_tensors = True
    shares: ClassVar[bool] = False
    """Whether there is one sub-pool for all streams, so that a block may go from any to any."""

    def __init__(self, timeline: Timeline, config: WorkspaceConfig, source: Source | None = None) -> None:
        self.timeline = timeline
        self.config = config
        self.source = source or DriverSource(timeline, config.granularity, config.capacity, config.restorable)
        self.pool = Pool(timeline, self.source, self.home)
        # A capture's footprint is lengthened at its end, where the next lease of a larger bucket has to find room.
        self.pool.two_ends = not self.source.fixed
        self.locked = False
        self._largest_declared = 0
        self._declared: dict[tuple[Any, Layout], int] = {}
        self._may_fence = "fence" in config.policy
        # A capture that takes more of what is reserved does not grow the pool.
        self._may_grow = self.source.fixed or "grow" in config.policy
        self._settle()
        self._lanes = Lanes(timeline, self)
        self._asleep: list[int] = []
        self.growths = 0

    @property
    def elided(self) -> int:
        """Uses that needed no fence."""
        return self.pool.elided

    def home(self, stream: Stream) -> Home:
        """Sub-pool a stream's blocks belong to."""
        raise NotImplementedError

    def elsewhere(self, request: Request, stream: Stream) -> Block | None:
        """An ordered block outside the stream's own sub-pool, if the strategy lets it take one."""
        raise NotImplementedError

    def homes(self, stream: Stream) -> Iterator[Home]:
        """Sub-pools to look for a block worth a fence in, the stream's own first."""
        own = self.home(stream)
        yield own
        yield from [home for home in self.pool.free if home != own]

    def _settle(self) -> None:
        """Whether a block goes from stream to stream the short way: where a fence comes before growth at any time.

        And whether free bytes are divided by the streams that used them.
        """
        grows_first = self.config.policy.startswith("grow") or self.config.in_flight > 0
        fences_first = self._may_fence and (self.locked or not self._may_grow or not grows_first)
        self.pool.hands_over = self.shares and fences_first
        # A pool that may grow has a block for each size instead, as it had before it was locked.
        self.pool.refits = self.locked
        # In a locked pool a fence is better than bytes in pieces: what no longer fits is refused.
        self.pool.by_streams = self.shares and not self.source.fixed and not self.locked
        if self.locked:
            self.pool.join_neighbours()

    # -- placement -------------------------------------------------------------------------------------------
    def place(self, request: Request, stream: Stream) -> Block:
        block = request.unshelve(stream)
        if block is None and stream.capture is None:
            block = refit(self.pool, request, stream, self.tensors) or self._whole(request, stream)
        if block is None:
            block = self._search(request, stream)
            block.request = request
        return block

    def _whole(self, request: Request, stream: Stream) -> Block | None:
        """An ordered block as large as the layout's declared dims, of which the request has the front.

        Where all that was declared fits side by side, there is one for each: cut for less, it would be in the way of
        the largest. What the request leaves, the pool takes back where it empties its shelves.
        """
        whole = self._declared.get((request.key, request.resolved.layout), 0)
        if not (self.locked and self.pool.roomy and request.direct and whole >= request.nbytes):
            return None
        block = self.pool.ordered(whole, stream, self.home(stream))
        if block is None or block.events:  # what the request leaves would be without them
            return None
        block = self._take(block, whole, stream)
        self.pool.note_beyond(block, request, block.uses)
        block.uses, block.events, block.request = {}, None, request
        return block

    def _search(self, request: Request, stream: Stream) -> Block:
        block, wanted = self._ordered(request, stream), self._largest_declared
        if request.nbytes >= LARGE and self.pool.divided_by_shelves(block, request.nbytes, wanted):
            self.pool.take_back_large()
            block = self._ordered(request, stream)
        # Cut at its end, a block's rest stays one piece with what waits on shelves before it: where all that was
        # declared fits side by side, there comes to be a block for each.
        at_end = block is not None and self._divides(block, request)
        if block is None or (at_end and (not self.pool.roomy or self._divides(block, request, at_end=True))):
            at_end = False
            if self.pool.consolidate():
                block = self._ordered(request, stream)
        if block is None and self.pool.by_streams and self._gather_ordered(request, stream):
            block = self._ordered(request, stream)
        if block is None:
            block = self._unordered(request, stream)
        block = self._take(block, request.nbytes, stream, at_end)
        block.uses, block.events = {}, None
        return block

    def _take(self, block: Block, nbytes: int, stream: Stream, at_end: bool = False) -> Block:
        # Uses on other streams that needed no fence, because the clocks show them ordered (fences were subtracted).
        self.pool.elided += sum(used != stream.id for used in block.uses)
        return self.pool.take(block, nbytes, self.home(stream), at_end)

    def _divides(self, block: Block, request: Request, at_end: bool = False) -> bool:
        """Whether a cut there, beside what waits on shelves, leaves no place for the largest that was declared."""
        wanted = self._largest_declared
        if not self.locked or self.pool.largest() - request.nbytes >= wanted:
            return False
        return not self.pool.leaves_room(block, request.nbytes, wanted, at_end)

    def _ordered(self, request: Request, stream: Stream) -> Block | None:
        return self.pool.ordered(request.nbytes, stream, self.home(stream)) or self.elsewhere(request, stream)

    def _gather_ordered(self, request: Request, stream: Stream) -> bool:
        """Make one block of ordered neighbours that other streams than each other's used; whether it fits."""
        return self.pool.gather(request.nbytes, lambda block: self.timeline.ordered(block, stream))

    def _unordered(self, request: Request, stream: Stream) -> Block:
        """No free block is ordered: fence or grow, as the policy has it, else refuse."""
        pending = self.pool.pending(request.nbytes, stream, self.homes(stream)) if self._may_fence else None
        if pending is None:
            return self._last_resort(request, stream)
        if self._grows_first(request, stream):
            try:
                return self._grow(request, stream)
            except (CapacityError, CaptureError):
                # A fence needs no memory: it is the answer to a full device. Growth may have coalesced what was found.
                ready = self._ordered(request, stream)
                again = ready or self.pool.pending(request.nbytes, stream, self.homes(stream))
                if again is None:
                    raise
                if again is ready:
                    return again
                pending = again
        self._fence(pending, request, stream)
        return pending

    def _grows_first(self, request: Request, stream: Stream) -> bool:
        """Whether growth comes before the fence: by policy, or while little waits for other streams."""
        if self.locked or not self._may_grow:
            return False
        room = self.config.in_flight * request.nbytes
        return self.config.policy.startswith("grow") or (room > 0 and self.pool.in_flight(stream) < room)

    def _last_resort(self, request: Request, stream: Stream) -> Block:
        """Nothing free fits: what graphs or collectives now gone had pinned may, else the pool grows, or refuses."""
        timeline = self.timeline
        pinned = len(timeline.pins) + len(timeline.unwaited)
        timeline.settle_releases()
        if len(timeline.pins) + len(timeline.unwaited) < pinned or self.pool.gather(request.nbytes):
            self.pool.consolidate()
            return self._ordered(request, stream) or self._unordered(request, stream)
        if self.locked or not self._may_grow:
            raise self._refusal(request, stream)
        return self._grow(request, stream)

    def _fence(self, block: Block, request: Request, stream: Stream) -> None:
        clocks = self.timeline.clocks
        missing = [
            (self.timeline.stream_of(used).name, epoch, stream.clock.seen.get(used, 0))
            for used, epoch in block.uses.items()
            if not clocks.ordered(stream.id, used, epoch)
        ]
        self.pool.elided -= self.timeline.fence(block, stream)
        for owner, needs, knows in missing:
            edge = f"{stream.name} knows {owner} up to {knows}, needs {needs}"
            self.timeline.explanations.note("fence", request, block, edge)

    def _grow(self, request: Request, stream: Stream) -> Block:
        # Micro-batch slots grow together: each may need what this one needs now.
        wanted = request.nbytes * (1 if self.source.fixed else self.config.micro_batches)
        try:
            block = self.pool.grow(wanted, stream)
        except CapacityError:
            self.timeline.explanations.note("refusal", request)
            raise
        self.timeline.explanations.note("growth", request)
        self.growths += 1
        return block

    def _refusal(self, request: Request, stream: Stream) -> CapacityError:
        held, on_loan = self.held(), self.pool.on_loan()
        self.timeline.explanations.note("refusal", request)
        site, state = call_site(), self.timeline.state
        pending = self.pool.pending(request.nbytes, stream, self.homes(stream))
        other, streams = "", ""
        if pending is not None:
            other = pending.request.owner if pending.request is not None else "earlier leases"
            streams = ", ".join(self.timeline.stream_of(used).name for used in pending.uses)
        return CapacityError(
            f"{request.owner} asks {request.nbytes} bytes on {stream!r} (lane {state.lane!r}, micro-batch "
            f"{state.micro_batch}) at {site}, and the workspace "
            + ("is locked" if self.locked else f"may not grow (policy={self.config.policy!r})")
            + f" at {held.reserved} bytes ({held.allocated} on lease{named(on_loan)})"
            + (f"; the block that fits was last used by {other} on {streams}" if other else ""),
            self._remedy(request.nbytes <= held.reserved - held.allocated, bool(other), bool(on_loan)),
            owner=request.owner, asked=request.nbytes, capacity=held.reserved, allocated=held.allocated,
            stream=stream.name, lane=state.lane, micro_batch=state.micro_batch, site=site,
            setting="headroom" if self.locked and not other else "policy", other=other, other_streams=streams,
        )  # fmt: skip

    def _remedy(self, enough: bool, unordered: bool, leased: bool) -> str:
        """What helps where `enough` bytes are free in all, a block would fit but for its last use, some are leased."""
        if unordered:
            return "order the streams before the acquire (ws.fork, ws.event), or allow fences: policy='fence,grow'"
        if not self.locked:
            return "declare the layout's largest dims and reserve(), or allow growth: policy='fence,grow'"
        if enough:
            return (
                "bytes are free, in pieces too small or kept for graphs: raise `headroom`, declare what lives apart in "
                "phases and what graphs take with lane=..., or unlock()"
            )
        if not self.pool.slabs:
            return "call reserve() before lock(): nothing is reserved; or unlock()"
        release = "release what is on lease, " if leased else ""
        return f"{release}declare the layout's largest dims before reserve(), raise `headroom`, or unlock()"

    # -- release ---------------------------------------------------------------------------------------------
    def give_back(self, block: Block, stream: Stream) -> None:
        if len(block.uses) > 1:
            self._prune(block, stream)
        stream_of = self.timeline.stream_of
        exact = self.config.recording == "exact" or any(stream_of(used).exact for used in block.uses)
        if exact:
            try:
                self._record(block)
            finally:
                self.pool.put(block)  # with its uses, also where one of them got no event
        elif len(block.uses) > 1 or stream.capture is not None or block.request is None or not block.nbytes:
            self.pool.put(block)
        else:
            self.pool.shelve(block, block.request, stream)

    def abandon(self, block: Block) -> None:
        """The pool of a capture ends with it."""

    def _prune(self, block: Block, stream: Stream) -> None:
        """Drop uses that precede the acquirer's: whatever is ordered after the acquirer is ordered after them too."""
        clocks = self.timeline.clocks
        if block.uses.get(stream.id) != stream.clock.epoch:
            return  # the acquirer's use is older than what it has seen since
        ordered = clocks.ordered
        kept: Uses = {}
        for used, epoch in block.uses.items():
            if used == stream.id or not ordered(stream.id, used, epoch):
                kept[used] = epoch
        self.pool.elided += len(block.uses) - len(kept)
        block.uses = kept

    def _record(self, block: Block) -> None:
        """Events of their own for the uses, so that a later fence waits for nothing enqueued after them."""
        events = block.events = dict(block.events or {})
        for used in block.uses:
            owner = self.timeline.stream_of(used)
            if used in events and events[used].epoch >= block.uses[used]:
                continue
            if (self.config.recording == "exact" or owner.exact) and self.timeline.records(owner):
                events[used] = self.timeline.exact_event(owner)
        block.events = events or None

    def tensors(self, request: Request, block: Block) -> list[Any]:
        views = block.slab.views.get((block.offset, request))
        if views is None:
            views = self._built(request, block)
            block.slab.keep_views(block.offset, request, views)
        block.views[request] = views
        return views

    def _built(self, request: Request, block: Block) -> list[Any]:
        buffer, base = block.slab.buffer, block.slab.start + block.offset
        base += request.start(block.address)
        tensor = self.timeline.driver.tensor
        # Built outside inference mode, so that a later use outside it is not refused.
        with torch.inference_mode(False):
            return [tensor(buffer, base + one.offset, one.shape, one.dtype) for one in request.extents]

    def fresh(self, request: Request, position: int, stream: Stream) -> Any:
        raise NotImplementedError(f"{self.name} lends blocks")

    def received(self, request: Request, nbytes: int) -> None:
        raise NotImplementedError(f"{self.name} lends blocks")

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        raise NotImplementedError(f"{self.name} lends blocks")

    # -- size ------------------------------------------------------------------------------------------------
    def reserve(self, nbytes: int, declared: Sequence[Request]) -> None:
        for one in declared:
            whose = one.key, one.resolved.layout
            self._declared[whose] = max(self._declared.get(whose, 0), one.nbytes)
        self._largest_declared = max(self._declared.values(), default=0)
        missing = nbytes - sum(slab.nbytes for slab in self.pool.slabs)
        if missing <= 0:
            return
        # One slab: two would refuse a layout that fits their sum. Idle ones are given up for it.
        self.pool.grow(missing + self.pool.idle(), self.timeline.current(), below=MAX_BYTES)

    def lock(self, locked: bool) -> None:
        self.locked = locked
        self._settle()

    def lane(self, name: str, *, complete_only: bool) -> Lane:
        return self._lanes.of(name, complete_only=complete_only)

    def lanes(self) -> dict[str, int]:
        """Bytes of each lane that graphs or open captures pin."""
        return self._lanes.pinned()

    def under_way(self) -> list[str]:
        """Lanes with an open capture, or a replay that has begun."""
        return self._lanes.under_way()

    def inside(self, lane: Lane | None) -> Pooled:
        if lane is None:
            raise TypeError(f"a capture of {self.name} needs the lane it asked for")
        source = LaneSource(lane)
        child = type(self)(self.timeline, self.config, source)
        child.pool.adopt(source.slabs())
        return child

    def trim(self) -> int:
        # What a locked workspace gives up it could not get back.
        return 0 if self.locked else self.pool.give_up_idle()

    # -- sleep -----------------------------------------------------------------------------------------------
    def quiesce(self) -> int:
        """See `workspace.sleep.Sleeper`."""
        self.pool.consolidate()
        return self.pool.taken

    def sleep(self) -> int:
        if isinstance(self.source, DriverSource) and self.source.restorable:
            return self.source.unmap(self.pool.slabs)
        before = list(self.pool.slabs)
        try:
            return self.pool.give_up_idle()
        finally:
            self._asleep[:0] = [slab.nbytes for slab in before if slab not in self.pool.slabs]

    def wake(self) -> int:
        if isinstance(self.source, DriverSource) and self.source.restorable:
            return self.source.remap(self.pool.slabs)
        stream, taken = self.timeline.current(), 0
        while self._asleep:
            slab = self.source.obtain(self._asleep[0], stream)
            slab.first.home = self.home(stream)
            self.pool.adopt([slab])
            taken += self._asleep.pop(0)
        return taken

    def held(self) -> Held:
        slabs = tuple(slab.nbytes for slab in self.pool.slabs if slab.has_memory())
        if not isinstance(self.source, DriverSource):
            return Held(self.pool.allocated, sum(slabs), sum(slabs), slabs=slabs)
        retired = list(self.source.retired.values())
        return Held(
            allocated=self.pool.allocated,
            reserved=self.source.reserved,
            peak_reserved=self.source.peak,
            retired=sum(nbytes for nbytes, _ in retired),
            pinned=self.source.pinned(),
            slabs=slabs,
            growths=self.growths,
        )

    def close(self) -> None:
        if self.source.fixed:
            self.pool.disown()
        else:
            self.pool.give_up_idle()
