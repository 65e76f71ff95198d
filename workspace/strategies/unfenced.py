"""``unfenced``: the reverted design, a model-wide slab with views cached by size and no lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from workspace.block import TAKEN, Block, Slab, Uses
from workspace.config import WorkspaceConfig
from workspace.errors import CapacityError
from workspace.lane import Lane
from workspace.provider import Held, Homes
from workspace.request import Request
from workspace.source import DriverSource
from workspace.streams import Stream
from workspace.timeline import Timeline


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
        self.source = DriverSource(timeline, config.granularity, config.capacity)
        self._places: dict[str, Slab] = {}
        self._blocks: dict[Request, Block] = {}
        self._allocated = 0
        self.locked = False
        self.growths = 0

    def place(self, request: Request, stream: Stream) -> Block:
        block = self._blocks.get(request)
        if block is None:
            block = self._blocks[request] = self._find(request, stream)
        self._allocated += request.nbytes
        return block

    def _find(self, request: Request, stream: Stream) -> Block:
        name = request.resolved.layout.family or request.owner
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
                self._blocks.clear()
            slab = self._places[name] = self.source.obtain(request.nbytes, stream)
        block = Block(slab, 0, request.nbytes)
        block.state = TAKEN
        block.request = request
        return block

    def give_back(self, block: Block | None, stream: Stream) -> None:
        if block is not None:
            self._allocated -= block.nbytes

    def abandon(self, block: Block) -> None:
        self._allocated -= block.nbytes

    def tensors(self, request: Request, block: Block) -> list[Any]:
        base = block.slab.start + request.start(block.address)
        tensor = self.timeline.driver.tensor
        views = [tensor(block.slab.buffer, base + one.offset, one.shape, one.dtype) for one in request.extents]
        block.views[request] = views
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

    def held(self) -> Held:
        slabs = tuple(slab.nbytes for slab in self._places.values())
        return Held(
            allocated=self._allocated, reserved=self.source.reserved,
            peak_reserved=self.source.peak, slabs=slabs, growths=self.growths,
        )  # fmt: skip

    def close(self) -> None:
        """Called at a capture's end too, where the places live on."""
