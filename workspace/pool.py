"""The pool: blocks that split and coalesce, indexed so that a repeated request costs a look-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from workspace.block import FREE, GONE, TAKEN, Block, Shelf, Slab, Uses, size_of
from workspace.errors import CapacityError
from workspace.free import FreeBlocks
from workspace.layout import MAX_BYTES
from workspace.request import Request
from workspace.source import Source
from workspace.streams import Stream
from workspace.timeline import Timeline

Home = int

SHELVED_BLOCKS = 4096
"""After so many blocks have gone to shelves all are coalesced, so that a run that meets ever new sizes stays flat in
host memory."""

LARGE = 8 << 20
SHARE = 256
UNCROWDED, SPARSE = 2, 4
"""A block of `LARGE` bytes, or of one byte in `SHARE` of the pool, goes to a shelf only while others take no more than
one byte in `UNCROWDED`. It stays there when a request of `LARGE` bytes is searched for only while all that is taken,
what waits on shelves included, is no more than one byte in `SPARSE`, and the cut leaves the largest that was declared
a place. Else it would divide what other large requests need, and the pool would grow beyond what was reserved."""


LARGEST = 8
"""A request of one byte in so many of the pool is one of the largest. Of 5 to 14 what left the leases of DeepSeek-V4's
layers, Flash and Pro, on one rank and on four, whole most often in exactly the bytes that they need."""


def _large(held: int) -> int:
    """From how many bytes on a block of a pool that holds so many is large."""
    return min(LARGE, held // SHARE)


def _starts(run: list[Block]) -> Iterator[int]:
    """Where each block of a run begins in it."""
    return accumulate((block.nbytes for block in run[:-1]), initial=0)


def _by_address(block: Block) -> tuple[int, int]:
    return block.slab.address, block.offset


def named(owners: dict[str, int]) -> str:
    """What owners have, the most first, as the end of a clause; empty where nobody has any."""
    most = sorted(owners.items(), key=lambda entry: -entry[1])
    listed = [f"{owner} {nbytes}" for owner, nbytes in most[:3]] + ([f"{len(most) - 3} more"] if len(most) > 3 else [])
    return f": {', '.join(listed)}" if listed else ""


class Pool:
    """Free and shelved blocks of one provider.

    A released block whose only last use is on one stream goes to a *shelf* for (request, stream): the next such request
    takes it from there as it is. Every other released block is coalesced with its free neighbours at once; shelved
    blocks are, before the pool would fence or grow.

    With `by_streams`, neighbours that different streams used last stay two blocks until no single one will do (see
    `gather`): as one block, whoever takes a part of it would have to wait for all of these streams.

    Parameters
    ----------
    home
        Sub-pool of a stream: free blocks of different homes never coalesce. A pool shared by all streams has one home.

    Attributes
    ----------
    shelves
        Those that blocks are on, or come back to.
    by_streams
        Whether free neighbours are coalesced at once only where the same streams used them last.
    two_ends
        Whether large requests take the first block that fits: the largest its front, the others its end.
    large_shelved
        Whether large blocks may wait on shelves, in a pool that is not roomy.
    roomy
        Whether all that was declared fits side by side: then large blocks wait on shelves like small ones.
    hands_over
        Whether a shelved block goes to another stream the short way; see `workspace.handover`.
    refits
        Whether a shelved block serves smaller dims of its layout; see `workspace.refit`.
    elided
        Uses on other streams that needed no fence, because the clocks show them ordered.
    """

    __slots__ = (
        "_largest", "_longer", "_shelved", "by_streams", "elided", "free", "hands_over", "home", "large_shelved",
        "refits", "roomy", "shelves", "slabs", "source", "taken", "timeline", "two_ends",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, source: Source, home: Callable[[Stream], Home]) -> None:
        self.timeline = timeline
        self.source = source
        self.home = home
        self.slabs: list[Slab] = []
        self.free: dict[Home, FreeBlocks] = {}
        self.taken = 0
        self.shelves: dict[Shelf, None] = {}
        self.by_streams = False
        self.two_ends = False
        self.roomy = False
        self.hands_over = False
        self.refits = False
        self.elided = 0
        self._shelved = 0
        self.large_shelved = False
        self._largest: int | None = None
        self._longer: dict[Block, Uses] = {}  # than their requests; last uses of what they have beyond

    # -- shelves ---------------------------------------------------------------------------------------------
    def shelve(self, block: Block, request: Request, stream: Stream) -> None:
        """Put a block, used last on this stream only, where the same request finds it; in a crowded pool, back."""
        held = self._held()
        if not self.roomy and block.nbytes >= _large(held):
            # What waits on shelves counts as taken: only without the large of them is it known how much others take.
            if self._crowded(block, held):
                self.take_back_large()
                self._shorten()
            if self._crowded(block, held):
                self.put(block)
                return
            self.large_shelved = True
        request.lender = self
        shelf = request.shelve(block, stream)
        request.sizes.add(shelf, stream)
        self.shelves[shelf] = None
        self._shelved += 1
        if self._shelved > SHELVED_BLOCKS:
            self.consolidate()

    def refitted(self, block: Block, shelf: Shelf, before: Shelf) -> None:
        """Note that a block comes back to another shelf than before, of its layout at other dims."""
        request, stream = block.request, block.stream
        assert request is not None and stream is not None
        self.note_beyond(block, request, {stream.id: block.epoch})
        request.lender = self
        request.sizes.add(shelf, stream)
        self.shelves[shelf] = None
        if not before.blocks:
            self.shelves.pop(before, None)

    def note_beyond(self, block: Block, request: Request, uses: Uses) -> None:
        """Keep the last uses of what a block has beyond the request that gets it."""
        if block.nbytes > request.nbytes:
            self._longer[block] = uses
        else:
            self._longer.pop(block, None)

    def take_back_large(self) -> None:
        """Coalesce the large blocks that wait on shelves; in a roomy pool they stay."""
        if self.large_shelved:
            self._empty_shelves(_large(self._held()))
            self.large_shelved = False

    def crowd(self) -> None:
        """More was declared than fits side by side: the pool is roomy no longer."""
        if self.roomy:
            self.roomy, self.large_shelved = False, True  # they may be: till now it made no difference

    def _held(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    def _crowded(self, block: Block, held: int) -> bool:
        return (self.taken - block.nbytes) * UNCROWDED > held

    def divided_by_shelves(self, block: Block | None, nbytes: int, wanted: int) -> bool:
        """Whether large blocks on shelves are in the way of a large request, for which a free block was found.

        `wanted`: the largest that was declared, which keeps a place; 0 where nothing was.
        """
        if not self.large_shelved:
            return False
        if block is None or not wanted or (self.taken + nbytes) * SPARSE > self._held():
            return True
        return not self.leaves_room(block, nbytes, wanted)

    def put(self, block: Block) -> None:
        """Take a released block back and coalesce it."""
        block.leave_shelf()
        self._longer.pop(block, None)
        self.taken -= block.nbytes
        self._insert(block)

    def shelved(self) -> Iterator[Block]:
        """Blocks on shelves, which count as taken and are out on no lease."""
        for shelf in list(self.shelves):
            yield from list(shelf)

    @property
    def allocated(self) -> int:
        """Bytes out on lease."""
        waiting = list(self.shelved())
        return self.taken - size_of(waiting) - sum(self._beyond(block) for block in self._longer.keys() - set(waiting))

    def on_loan(self) -> dict[str, int]:
        """Bytes out on lease by owner, in the order of their addresses."""
        shelved, found = {id(block) for block in self.shelved()}, dict[str, int]()
        for slab in self.slabs:
            for block in slab.blocks():
                if block.state == TAKEN and block.request is not None and id(block) not in shelved:
                    found[block.request.owner] = found.get(block.request.owner, 0) + block.nbytes - self._beyond(block)
        return found

    def _beyond(self, block: Block) -> int:
        """Bytes that a block on lease has beyond its request."""
        return block.nbytes - block.request.nbytes if block in self._longer and block.request is not None else 0

    # -- the search ------------------------------------------------------------------------------------------
    def ordered(self, nbytes: int, stream: Stream, home: Home) -> Block | None:
        """The smallest free block of a home that fits and whose last uses all precede the stream's next work.

        For a large request the first by address; see `take`.
        """
        fits = self.timeline.ordered
        found = (block for block in self._fitting(nbytes, home) if fits(block, stream))
        return min(found, key=_by_address, default=None) if self.two_ends and nbytes >= LARGE else next(found, None)

    def pending(self, nbytes: int, stream: Stream, homes: Iterator[Home]) -> Block | None:
        """The free block that needs the fewest fences, of those the stream may wait for; of equals the smallest."""
        best: Block | None = None
        fewest = 0
        for home in homes:
            for block in self._fitting(nbytes, home):
                if not self.timeline.fenceable(block, stream):
                    continue
                fences = self.unordered(block, stream)
                if best is None or fences < fewest:
                    best, fewest = block, fences
                if fewest <= 1:
                    break
        return best

    def unordered(self, block: Block, stream: Stream) -> int:
        """Number of last uses that do not precede the stream's next work."""
        ordered = self.timeline.clocks.ordered
        return sum(not ordered(stream.id, used, epoch) for used, epoch in block.uses.items())

    def in_flight(self, stream: Stream) -> int:
        """Free bytes whose last uses the stream would have to wait for."""
        free = (block for blocks in self.free.values() for block in blocks)
        return sum(block.nbytes for block in free if not self.timeline.ordered(block, stream))

    def take(self, block: Block, nbytes: int, home: Home, at_end: bool = False) -> Block:
        """Lease the first `nbytes` of a free block, or the last, which then belong to `home`; the rest stays free.

        With `two_ends` a large request of less than one byte in `LARGEST` of the pool gets the block's end, so that the
        largest leases and those beside them grow from opposite ends: what one of them leaves is then in one piece.
        """
        return self._lend(block, self._before(block, nbytes, at_end), nbytes, home)

    def _before(self, block: Block, nbytes: int, at_end: bool) -> int:
        """Where in a free block so many bytes are cut."""
        at_end = at_end or self.two_ends and LARGE <= nbytes and nbytes * LARGEST < self._held()
        return block.nbytes - nbytes if at_end else 0

    def leaves_room(self, block: Block, nbytes: int, wanted: int, at_end: bool = False) -> bool:
        """Whether the wanted bytes remain in one piece once so many are cut from a free block, or the longest there is.

        A piece is what is free or waits on shelves, neighbours together, or what one lease has and will give back.
        """
        before = self._before(block, nbytes, at_end)
        cut = before, block.nbytes - nbytes - before
        waiting = {id(one) for one in self.shelved()}
        uncut = left = 0
        for slab in self.slabs:
            whole = piece = 0
            for one in slab.blocks():
                if one.state != FREE and id(one) not in waiting:
                    uncut, left = max(uncut, whole, one.nbytes), max(left, piece, one.nbytes)
                    whole = piece = 0
                    continue
                whole += one.nbytes
                if one is block:
                    left, piece = max(left, piece + cut[0]), cut[1]
                else:
                    piece += one.nbytes
            uncut, left = max(uncut, whole), max(left, piece)
        return left >= min(wanted, uncut)

    def _lend(self, block: Block, before: int, nbytes: int, home: Home) -> Block:
        """Take so many bytes of a free block behind the first `before`; the rest stays free."""
        self._remove(block)
        if before:
            front, block = block, block.split(before)
            self._insert(front, coalesce=False)
        if block.nbytes > nbytes:
            self._insert(block.split(nbytes), coalesce=False)
        block.state = TAKEN
        block.home = home
        self.taken += block.nbytes
        return block

    # -- growth ----------------------------------------------------------------------------------------------
    def grow(self, nbytes: int, stream: Stream, below: int | None = None) -> Block:
        """Obtain bytes for a block of this size, after giving up slabs smaller than `below`: by default, than it.

        Raises `CapacityError`, with every lease as before and as many bytes as before, as far as the device has them.
        """
        below = nbytes if below is None else below
        home = self.home(stream)
        for slab in self.slabs:
            tail = self._lengthen(slab, nbytes, stream)
            if tail is not None:
                tail.home = home
                self._insert(tail, coalesce=False)
                return tail
        # An idle slab that is large enough is only waited for by others: it is what growth keeps out of the way of.
        self.source.check(nbytes, self.idle(below))
        given = [] if self.source.fixed else self._give_up(below)
        if given:
            self.source.release_cached()
        try:
            return self._obtain(nbytes, home, stream)
        except CapacityError:
            for lost in given:
                try:
                    self._obtain(lost, home, stream)
                except CapacityError:
                    break  # somebody else took the memory meanwhile
            raise

    def _obtain(self, nbytes: int, home: Home, stream: Stream) -> Block:
        slab = self.source.obtain(nbytes, stream)
        self.slabs.append(slab)
        slab.first.home = home
        self._insert(slab.first)
        return slab.first

    def _lengthen(self, slab: Slab, nbytes: int, stream: Stream) -> Block | None:
        """Make the slab longer in place so that its last block has this size, and is ordered; None if it cannot be."""
        last = slab.blocks()[-1]
        usable = last.state == FREE and self.timeline.ordered(last, stream)
        missing = nbytes - last.nbytes if usable else nbytes
        if not self.source.extend(slab, missing):
            return None
        if usable:
            self._remove(last)
        return slab.lengthen(missing, last if usable else None)

    def adopt(self, slabs: list[Slab]) -> None:
        """Start with these slabs, all of them free."""
        for slab in slabs:
            self.slabs.append(slab)
            self._insert(slab.first)

    def idle(self, below: int = MAX_BYTES) -> int:
        """Bytes of slabs, smaller than `below`, in which nothing is leased; shelves are emptied first."""
        self.consolidate()
        return sum(slab.nbytes for slab in self.slabs if slab.nbytes < below and slab.idle())

    def give_up_idle(self, below: int = MAX_BYTES) -> int:
        """Give idle slabs smaller than `below` back to the source; returns the bytes.

        Blocks the host until their last uses are complete; a slab whose uses cannot be seen complete is kept.
        """
        return sum(self._give_up(below))

    def _give_up(self, below: int) -> list[int]:
        self.consolidate()
        given = []
        for slab in [slab for slab in self.slabs if slab.nbytes < below and slab.idle()]:
            nbytes = slab.nbytes
            self._merge(slab.blocks())
            if self.source.give_up(slab):
                self._remove(slab.first)
                slab.first.state = GONE
                self.slabs.remove(slab)
                given.append(nbytes)
        if given:
            self.source.reclaim()
        return given

    def gather(self, nbytes: int, usable: Callable[[Block], bool] = lambda block: True) -> bool:
        """Make one block of usable neighbours that are free and together large enough, whatever divides them.

        Of several such runs the smallest; returns whether there was one.
        """
        runs = [run for run in self.runs(usable) if len(run) > 1 and size_of(run) >= nbytes]
        if not runs:
            return False
        self._merge(min(runs, key=size_of))
        return True

    def join_neighbours(self) -> None:
        """Coalesce free blocks that different streams used last."""
        for run in self.runs():
            for block in run:
                if block.state == FREE:  # not gone into the one before
                    self._remove(block)
                    self._insert(block)

    def runs(self, usable: Callable[[Block], bool] = lambda block: True) -> list[list[Block]]:
        """Usable free blocks, neighbours together."""
        return [run for slab in self.slabs for run in slab.free_runs(usable)]

    def _merge(self, run: list[Block]) -> None:
        """Make neighbouring free blocks one, which belongs to the home of the first."""
        for block in run:
            self._remove(block)
        for _ in run[1:]:
            run[0].absorb_next()
        self._insert(run[0], coalesce=False)

    def consolidate(self) -> bool:
        """Empty all shelves into the free blocks, with what leases have beyond their requests; whether that is any."""
        found = self._empty_shelves(0)
        found = self._shorten() or found
        self._shelved = 0
        self.large_shelved = False
        return found

    def _shorten(self) -> bool:
        """Take back what blocks have beyond their requests, whose tensors stay; whether there was anything."""
        longer, self._longer = self._longer, {}
        for block, uses in longer.items():
            assert block.request is not None
            rest = block.shorten(block.request.nbytes)
            rest.uses = uses
            self.taken -= rest.nbytes
            self._insert(rest)
        return bool(longer)

    def _empty_shelves(self, least: int) -> bool:
        """Take back what waits on shelves of blocks of at least so many bytes; whether there was anything."""
        found = False
        for shelf in list(self.shelves):
            for block in [block for block in list(shelf) if block.nbytes >= least]:
                try:
                    shelf.remove(block)
                except ValueError:
                    continue  # a lease took it meanwhile
                assert block.stream is not None
                block.uses, block.events = {block.stream.id: block.epoch}, None
                self.put(block)
                found = True
            if not shelf.blocks:
                del self.shelves[shelf]
        return found

    def disown(self) -> None:
        """Let go of a parent's bytes (a capture has ended): who still names a lease of it must not keep them."""
        for slab in self.slabs:
            slab.drop_views()
            del slab.buffer
        self.slabs, self.free, self._largest = [], {}, None

    def claim(self, run: list[Block], nbytes: int) -> Block:
        """Take bytes of neighbouring free blocks out of circulation for a lane's footprint."""
        needed = [block for block, before in zip(run, _starts(run), strict=True) if before < nbytes]
        self._merge(needed)
        block = self._lend(needed[0], 0, nbytes, needed[0].home)  # the front: what is behind it may lengthen it
        block.request = None
        self.taken -= block.nbytes
        rest = block.next
        if rest is not None and rest.state == FREE and len(needed) > 1:  # a neighbour's home may be its own now
            self._remove(rest)
            self._insert(rest)
        return block

    def restore(self, block: Block) -> None:
        """Bring back bytes that `claim` took out."""
        self._insert(block)

    def claim_next(self, block: Block, nbytes: int, usable: Callable[[Block], bool]) -> bool:
        """Lengthen a claimed block by usable free bytes behind it."""
        run = next((run for run in block.slab.free_runs(usable) if run[0] is block.next), [])
        if size_of(run) < nbytes:
            return False
        self.claim(run, nbytes)
        block.absorb_next()
        return True

    # -- free blocks -----------------------------------------------------------------------------------------
    def largest(self) -> int:
        """Bytes that no free block exceeds, nor what neighbours would make together."""
        if self._largest is None:
            if self.by_streams:  # all that is free: to look at each run of neighbours takes longer than a lease
                self._largest = sum(free.nbytes for free in self.free.values())
            else:
                self._largest = max((free.largest for free in self.free.values()), default=0)
        return self._largest

    def _fitting(self, nbytes: int, home: Home) -> list[Block]:
        free = self.free.get(home)
        return [] if free is None else free.fitting(nbytes)

    def _insert(self, block: Block, *, coalesce: bool = True) -> None:
        block.state = FREE
        if coalesce:
            block = self._coalesce(block)
        free = self.free.get(block.home)
        if free is None:
            free = self.free[block.home] = FreeBlocks()
        free.add(block)
        self._largest = None

    def _coalesce(self, block: Block) -> Block:
        after = block.next
        if after is not None and self._one_with(after, block):
            self._remove(after)
            block.absorb_next()
        before = block.prev
        if before is not None and self._one_with(before, block):
            self._remove(before)
            before.absorb_next()
            block = before
        return block

    def _one_with(self, neighbour: Block, block: Block) -> bool:
        """Whether a free block and its neighbour become one at once."""
        if neighbour.state != FREE or neighbour.home != block.home:
            return False
        used, own = neighbour.uses, block.uses
        return not self.by_streams or not used or not own or used.keys() == own.keys()

    def _remove(self, block: Block) -> None:
        free = self.free[block.home]
        free.remove(block)
        if not free:  # the stream that was at home there may be gone for good
            del self.free[block.home]
        self._largest = None
