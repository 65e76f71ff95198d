"""``unfenced``: the reverted design, a model-wide slab with views cached by size and no lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from workspace.block import TAKEN, Block, Shelf, Slab, Uses
from workspace.config import WorkspaceConfig
from workspace.errors import CapacityError
from workspace.lane import Lane
from workspace.provider import Held, Homes
from workspace.request import Request
from workspace.source import DriverSource
from workspace.streams import Stream
from workspace.timeline import Timeline

BLOCKS_KEPT = 2048
"""After so many, all views are forgotten, so that a run that meets ever new sizes stays flat in host memory."""


class Unfenced:
    """Unsafe: each layout has one place, handed out again whoever still reads it; a family's layouts overlay.

    Storage of a place is replaced by a larger one when a larger request comes;
    the old one lives as long as tensors over it do.
    """

    name: ClassVar[str] = "unfenced"
    safe: ClassVar[bool] = False
    lends_tensors = True

    def __init__(self, timeline: Timeline, config: WorkspaceConfig) -> None:
        self.timeline = timeline
        self.source = DriverSource(timeline, config.granularity, config.capacity, config.restorable)
        self._places: dict[str, Slab] = {}
        self._asleep: dict[str, int] = {}
        self._views: dict[Request, list[Any]] = {}
        self._shelves: set[Shelf] = set()
        self._blocks: set[Block] = set()
        self._replaced = Shelf()
        self._taken = 0
        self.locked = False
        self.growths = 0

    def place(self, request: Request, stream: Stream) -> Block:
        waiting = request.unshelve(stream)
        if waiting is not None:
            return waiting
        slab = self._find(request, stream)
        if len(self._blocks) >= BLOCKS_KEPT:
            self._forget_views()
        block = Block(slab, 0, request.nbytes)
        block.state = TAKEN
        block.request = request
        if request in self._views:
            block.views[request] = self._views[request]
        self._blocks.add(block)
        self._taken += block.nbytes
        return block

    def _find(self, request: Request, stream: Stream) -> Slab:
        """The place of a request's layout, made or replaced where there is none that is large enough."""
        name = _place(request)
        slab = self._places.get(name)
        if slab is None or slab.nbytes < request.nbytes:
            if self.locked:
                raise CapacityError(
                    f"{request.owner} asks {request.nbytes} bytes of place {name!r}, which holds "
                    f"{slab.nbytes if slab else 0}, and the workspace is locked",
                    "run the largest request before lock()",
                    owner=request.owner, asked=request.nbytes, setting="headroom",
                )  # fmt: skip
            if slab is not None:
                self.growths += 1
                self._forget_views()
            slab = self._places[name] = self.source.obtain(request.nbytes, stream)
        return slab

    def _forget_views(self) -> None:
        """Nothing that was handed out so far is handed out again; what is still out comes back to nobody's shelf."""
        for block in self._blocks:
            block.shelf = self._replaced
        for shelf in self._shelves:
            self._discard(shelf)
        self._blocks, self._shelves, self._views = set(), set(), {}

    def _watch_views(self) -> None:
        """Let places know of all views, so that those which somebody else holds count."""
        for block in self._blocks:
            block.drop_views()
        for request, tensors in self._views.items():  # those of captures, whose blocks nobody keeps
            self._places[_place(request)].watch(request.owner, tensors)

    def _discard(self, shelf: Shelf) -> None:
        while shelf:
            try:
                self._taken -= shelf.pop().nbytes
            except IndexError:
                break  # a lease took the last one meanwhile

    def give_back(self, block: Block | None, stream: Stream) -> None:
        if block is None:
            return
        request = block.request
        if request is None or stream.capture is not None or block.shelf is self._replaced or not block.nbytes:
            self.abandon(block)
        else:
            self._shelves.add(request.shelve(block, stream))

    def abandon(self, block: Block) -> None:
        self._blocks.discard(block)
        self._taken -= block.nbytes

    def tensors(self, request: Request, block: Block) -> list[Any]:
        base = block.slab.start + request.start(block.address)
        tensor = self.timeline.driver.tensor
        views = [tensor(block.slab.buffer, base + one.offset, one.shape, one.dtype) for one in request.extents]
        self._views[request] = block.views[request] = views
        return views

    def fresh(self, request: Request, position: int, stream: Stream) -> Any:
        raise NotImplementedError(f"{self.name} lends blocks")

    def received(self, request: Request, nbytes: int) -> None:
        raise NotImplementedError(f"{self.name} lends blocks")

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        raise NotImplementedError(f"{self.name} lends blocks")

    def reserve(self, nbytes: int, declared: Sequence[Request]) -> None:
        """Make each layout's place at its declared size, as the reverted pool made its slab at start-up."""
        for request in sorted(declared, key=lambda one: -one.nbytes):
            self._find(request, self.timeline.current())

    def lock(self, locked: bool) -> None:
        self.locked = locked

    def lane(self, name: str, *, complete_only: bool) -> Lane | None:
        """None: whether graphs interleave is not looked at."""
        return None

    def inside(self, lane: Lane | None) -> Unfenced:
        return self

    def trim(self) -> int:
        return 0

    def quiesce(self) -> int:
        """See `workspace.sleep.Sleeper`."""
        for shelf in (*self._shelves, self._replaced):
            self._discard(shelf)
        return self._taken

    def sleep(self) -> int:
        self._watch_views()
        self._forget_views()
        if self.source.restorable:
            return self.source.unmap(list(self._places.values()))
        given = 0
        for name, slab in list(self._places.items()):
            if self.source.give_up(slab):
                del self._places[name]
                self._asleep[name] = slab.nbytes
                given += slab.nbytes
        self.source.reclaim()
        return given

    def wake(self) -> int:
        if self.source.restorable:
            return self.source.remap(list(self._places.values()))
        stream, taken = self.timeline.current(), 0
        for name, nbytes in list(self._asleep.items()):
            self._places[name] = self.source.obtain(nbytes, stream)
            taken += self._asleep.pop(name)
        return taken

    def held(self) -> Held:
        self._discard(self._replaced)
        slabs = tuple(slab.nbytes for slab in self._places.values() if slab.has_memory())
        shelved = sum(block.nbytes for shelf in self._shelves for block in list(shelf))
        return Held(
            allocated=self._taken - shelved, reserved=self.source.reserved, peak_reserved=self.source.peak,
            retired=sum(nbytes for nbytes, _ in self.source.retired.values()), pinned=self.source.pinned(),
            slabs=slabs, growths=self.growths,
        )  # fmt: skip

    def close(self) -> None:
        """Called at a capture's end too, where the places live on."""


def _place(request: Request) -> str:
    """The name of the place a request's layout has."""
    return request.resolved.layout.family or request.owner
