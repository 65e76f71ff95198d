"""``caching``: every tensor fresh from the framework's caching allocator, as model code without a workspace has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from workspace.block import Block, Uses
from workspace.config import WorkspaceConfig
from workspace.errors import DriverError
from workspace.lane import Lane, Lanes
from workspace.provider import Held, Homes
from workspace.request import Request
from workspace.streams import Stream
from workspace.timeline import Timeline


class Caching:
    """The reference for results: kernels run their returning form, the allocator keeps lifetimes.

    A freed tensor returns to the stream it was allocated on. ``record_stream`` is called for a use on another stream
    only where the clocks cannot show that the home stream comes after it.
    """

    name: ClassVar[str] = "caching"
    safe: ClassVar[bool] = True
    lends_tensors = False

    def __init__(self, timeline: Timeline, config: WorkspaceConfig) -> None:
        self.timeline = timeline
        self.config = config
        self.allocated = 0
        self.elided = 0
        self.recorded = 0
        self.untold: list[tuple[Homes, int, Uses]] = []
        self._counted: Caching = self
        self._lanes = Lanes(timeline, None)

    def place(self, request: Request, stream: Stream) -> Block | None:
        return None

    def give_back(self, block: Block | None, stream: Stream) -> None:
        raise NotImplementedError(f"{self.name} lends no blocks")

    def abandon(self, block: Block) -> None:
        raise NotImplementedError(f"{self.name} lends no blocks")

    def tensors(self, request: Request, block: Block) -> list[Any]:
        raise NotImplementedError(f"{self.name} lends no blocks")

    def fresh(self, request: Request, position: int, stream: Stream) -> Any:
        extent = request.extents[position]
        try:
            return self.timeline.driver.empty(extent.shape, extent.dtype, stream.key)
        except DriverError as error:  # `Timeline.call` without the call
            self.timeline.note(error)
            raise

    def received(self, request: Request, nbytes: int) -> None:
        self._counted.allocated += nbytes

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        extents, several, freed = request.extents, len(uses) > 1, 0
        try:
            for position, (tensor, home) in homes.items():
                freed += extents[position].nbytes
                if several or home.id not in uses:
                    for used in self.unordered(home, uses):
                        self.timeline.call(self.timeline.driver.record_use, tensor, used.key)
                        self.recorded += 1
        except BaseException:
            self.keep(homes)
            raise
        self._counted.allocated -= freed

    def keep(self, homes: Homes) -> None:
        """Hold tensors whose last uses the allocator could not be told of: dropped, they would go to their home streams
        while another reads them. They stay allocated until the host has seen all that was enqueued up to now."""
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor, _ in homes.values())
        timeline = self.timeline
        clocks = timeline.clocks.of.items()
        uses = {used: clock.epoch for used, clock in clocks if timeline.stream_of(used).capture is None}
        self.untold.append((homes, nbytes, uses))

    def _drop_untold(self) -> None:
        host, everything, self.untold = self.timeline.clocks.host, self.untold, []
        for homes, nbytes, uses in everything:
            if all(host.get(used, 0) >= epoch for used, epoch in uses.items()):
                self._counted.allocated -= nbytes
            else:
                self.untold.append((homes, nbytes, uses))

    def unordered(self, home: Stream, uses: Uses) -> list[Stream]:
        """Streams whose uses do not precede the home stream's next work."""
        ordered, found = self.timeline.clocks.ordered, []
        for used, epoch in uses.items():
            if used != home.id and not ordered(home.id, used, epoch):
                found.append(self.timeline.stream_of(used))
        self.elided += len(uses) - (home.id in uses) - len(found)
        return found

    def reserve(self, nbytes: int, declared: Sequence[Request]) -> None:
        """The framework's allocator keeps no reservations; its cache after a warm-up serves the same end."""

    def lock(self, locked: bool) -> None:
        """Nothing of this strategy can grow: the framework's allocator decides."""

    def lane(self, name: str, *, complete_only: bool) -> Lane:
        return self._lanes.of(name, complete_only=complete_only)

    def under_way(self) -> list[str]:
        """Lanes with an open capture, or a replay that has begun."""
        return self._lanes.under_way()

    def inside(self, lane: Lane | None) -> Caching:
        return CapturedCaching(self)

    def trim(self) -> int:
        self._drop_untold()
        self.timeline.call(self.timeline.driver.trim)
        return 0

    def held(self) -> Held:
        self._drop_untold()
        return Held(allocated=self.allocated)

    def close(self) -> None:
        """Tensors belong to their leases, but for those that were kept: nothing reads them once the device is idle."""
        if self.untold:
            self.timeline.call(self.timeline.driver.synchronize, None)
            self.untold.clear()


class CapturedCaching(Caching):
    """In a capture a tensor used on a side stream is kept until a join orders that use before its home stream.

    ``record_stream`` there keeps each tensor until the capture ends, since its event never completes while capturing.
    """

    def __init__(self, outside: Caching) -> None:
        super().__init__(outside.timeline, outside.config)
        self._counted = outside
        self._waiting: list[tuple[Any, Stream, Uses]] = []

    def place(self, request: Request, stream: Stream) -> Block | None:
        self._waiting = [entry for entry in self._waiting if self.unordered(entry[1], entry[2])]
        return None

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        for position, (tensor, home) in homes.items():
            self._counted.allocated -= request.extents[position].nbytes
            if self.unordered(home, uses):
                self._waiting.append((tensor, home, uses))

    def close(self) -> None:
        self._waiting = []
