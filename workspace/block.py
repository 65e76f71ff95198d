"""Blocks and slabs: the bytes a pool hands out, with the last uses that travel with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from workspace.driver import Buffer
from workspace.layout import ALIGNMENT
from workspace.streams import Event, Stream

if TYPE_CHECKING:
    from workspace.request import Request

Uses = dict[int, int]
"""Stream id -> epoch of that stream's last use. The block, not the tensor, carries them: they survive reuse."""

VIEWS_KEPT = 1024
"""Placements of a slab whose tensors are kept."""

WATCHED = 256
"""After so many tensors that a slab has let go of, or twice those that are alive, it looks which are."""

FREE, TAKEN, GONE = "free", "taken", "gone"
"""A taken block is out on lease or on a shelf."""


class Shelf(list["Block"]):
    """Released blocks that wait, uncut and with their tensors, for the same request on the same stream.

    Their last use is on that stream, so its next work may have them without a check, a search or a lock: ``append``
    and ``pop`` of a list are atomic. Whoever empties a shelf does so by ``pop`` too.

    Attributes
    ----------
    blocks
        How many belong to it: those on it, and those on lease that come back to it.
    """

    __slots__ = ("blocks",)
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = 0

    def __eq__(self, other: object) -> bool:
        return self is other

    def last(self) -> int:
        """Bytes of the block that was released last to it; 0 where none waits."""
        try:
            return self[-1].nbytes
        except IndexError:
            return 0  # also where a lease took the last one meanwhile

    def take(self, nbytes: int) -> Block | None:
        """The block that was released last to it, if it has so many bytes."""
        try:
            block = self.pop()
        except IndexError:
            return None
        if block.nbytes >= nbytes:
            return block
        self.append(block)
        return None


class Slab:
    """One allocation that a pool cuts into blocks.

    A base that is not aligned loses the bytes up to the next boundary; an aligned base is used as it is.

    Attributes
    ----------
    views
        Tensors built over it, by offset and request: whatever is cut and coalesced meanwhile, a placement that repeats
        finds them again.
    """

    __slots__ = (
        "__weakref__", "_most_watched", "_watched", "address", "buffer", "first", "nbytes", "outer", "start", "views",
    )  # fmt: skip

    def __init__(self, buffer: Buffer, start: int, nbytes: int, outer: Block | None = None) -> None:
        self.buffer = buffer
        self.start = start
        self.address = buffer.address + start
        self.nbytes = nbytes
        self.outer = outer
        self._watched: list[tuple[str, weakref.ref[Any]]] = []
        self._most_watched = WATCHED
        self.views: dict[tuple[int, Request], list[Any]] = {}
        self.first = Block(self, 0, nbytes)

    @classmethod
    def over(cls, buffer: Buffer) -> Slab:
        start = -buffer.address % ALIGNMENT
        return cls(buffer, start, (buffer.nbytes - start) // ALIGNMENT * ALIGNMENT)

    def has_memory(self) -> bool:
        """Whether there is memory behind its addresses, which a sleep may have taken."""
        return bool(getattr(self.buffer, "mapped", True))

    def blocks(self) -> list[Block]:
        found = [self.first]
        while (following := found[-1].next) is not None:
            found.append(following)
        return found

    def free_runs(self, usable: Callable[[Block], bool]) -> list[list[Block]]:
        """Its usable free blocks, neighbours together."""
        runs = groupby(self.blocks(), lambda block: block.state == FREE and usable(block))
        return [list(run) for free, run in runs if free]

    def idle(self) -> bool:
        """Whether all of it is free."""
        return all(block.state == FREE for block in self.blocks())

    def lengthen(self, nbytes: int, last: Block | None) -> Block:
        """Add bytes that now belong to the slab to its last block, or as a block behind it."""
        if last is not None:
            last.nbytes += nbytes
            last.drop_views()
        else:
            behind, last = self.blocks()[-1], Block(self, self.nbytes, nbytes)
            last.prev, behind.next = behind, last
        self.nbytes += nbytes
        return last

    def keep_views(self, offset: int, request: Request, tensors: list[Any]) -> None:
        """Remember tensors built at an offset; of too many, none."""
        if len(self.views) >= VIEWS_KEPT:
            self._forget_views()  # blocks on lease, and on shelves, have theirs still
        self.views[offset, request] = tensors

    def _forget_views(self) -> None:
        for (_, request), tensors in self.views.items():
            self.watch(request.owner, tensors)
        self.views = {}

    def drop_views(self) -> None:
        """Forget the tensors built over the slab and its blocks, none of which is on lease or on a shelf."""
        self._forget_views()
        for block in self.blocks():
            block.drop_views()

    def watch(self, owner: str, tensors: list[Any]) -> None:
        """Remember tensors that the pool lets go of: whoever else holds one pins the slab."""
        if self.outer is not None:
            self.outer.slab.watch(owner, tensors)
            return
        if len(self._watched) > self._most_watched:
            self._watched = [entry for entry in self._watched if entry[1]() is not None]
            self._most_watched = max(WATCHED, 2 * len(self._watched))
        for tensor in tensors:
            storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor
            self._watched.append((owner, weakref.ref(storage)))

    def pinned(self) -> list[str]:
        """Owners of such tensors that are still alive."""
        return sorted({owner for owner, alive in self._watched if alive() is not None})


class Block:
    """A byte range of a slab, free or taken.

    Attributes
    ----------
    uses, events
        Last uses of any byte in it, and the event recorded for a use where one was recorded at release.
    views
        Tensors built over the block, by request: what makes a repeated lease cheap.
    home
        The sub-pool the block belongs to.
    request, site
        Who leased it last, for reports.
    shelf, stream, epoch, lent, first
        On a shelf: which one, the stream it belongs to, that stream's epoch of the last use, the tensors built for the
        shelf's request, and the first three of them.
    """

    __slots__ = (
        "epoch", "events", "first", "home", "lent", "nbytes", "next", "offset", "prev", "request", "shelf", "site",
        "slab", "state", "stream", "uses", "views",
    )  # fmt: skip

    def __init__(self, slab: Slab, offset: int, nbytes: int) -> None:
        self.slab = slab
        self.offset = offset
        self.nbytes = nbytes
        self.state = FREE
        self.home = 0
        self.uses: Uses = {}
        self.events: dict[int, Event] | None = None
        self.views: dict[Request, list[Any]] = {}
        self.prev: Block | None = None
        self.next: Block | None = None
        self.request: Request | None = None
        self.site = ""
        self.shelf: Shelf | None = None
        self.stream: Stream | None = None
        self.epoch = 0
        self.lent: list[Any] = []
        self.first: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"<{self.state} block {self.address:#x}+{self.nbytes}>"

    @property
    def address(self) -> int:
        return self.slab.address + self.offset

    def split(self, nbytes: int) -> Block:
        """Cut the block after `nbytes`; return the rest, which carries the same last uses."""
        rest = self.shorten(nbytes)
        rest.uses = dict(self.uses)
        rest.events = dict(self.events) if self.events else None
        self.drop_views()
        return rest

    def shorten(self, nbytes: int) -> Block:
        """Cut off what is behind the first `nbytes`, which keep their tensors; return it, without any last use."""
        rest = Block(self.slab, self.offset + nbytes, self.nbytes - nbytes)
        rest.home, rest.request, rest.site = self.home, self.request, self.site
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.nbytes = nbytes
        return rest

    def absorb_next(self) -> None:
        """Take over the following block: bytes, and for each stream the later of the two uses."""
        other = self.next
        assert other is not None
        self.nbytes += other.nbytes
        self.next = other.next
        if other.next is not None:
            other.next.prev = self
        for used, epoch in other.uses.items():
            if self.uses.get(used, 0) < epoch:
                self.uses[used] = epoch
                event = other.events.get(used) if other.events else None
                if event is not None:
                    self.events = {**(self.events or {}), used: event}
                elif self.events:
                    self.events = {key: one for key, one in self.events.items() if key != used}
        self.drop_views()
        other.drop_views()
        other.state = GONE

    def leave_shelf(self) -> None:
        """Belong to no shelf any longer."""
        if self.shelf is not None:
            self.shelf.blocks -= 1
            self.shelf = None

    def forget_views(self, request: Request) -> None:
        """Forget the tensors built for a request, so that it gets new ones."""
        tensors = self.views.pop(request, None)
        self.slab.views.pop((self.offset, request), None)
        if tensors is not None:
            self.slab.watch(request.owner, tensors)

    def drop_views(self) -> None:
        """Forget the tensors built over the block: its bounds change. The slab keeps them."""
        self.views = {}
        self.lent, self.first = [], ()


def size_of(run: list[Block]) -> int:
    """Bytes of neighbours."""
    return sum(block.nbytes for block in run)


def first_three(tensors: list[Any]) -> tuple[Any, Any, Any]:
    """The tensors that a lease keeps in slots of its own; None where there are fewer."""
    return (*tensors, None, None, None)[:3]


def pinned_owners(slab: Slab) -> list[str]:
    """Drop the slab's cached tensors; return the owners of those that somebody else still holds."""
    slab.drop_views()
    return slab.pinned()
