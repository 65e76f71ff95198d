"""What every adaptor shares: it is a provider, and passes on what it does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workspace.block import Block, Uses
from workspace.lane import Lane
from workspace.provider import Held, Homes, WorkspaceProvider
from workspace.request import Request
from workspace.streams import Stream
from workspace.timeline import Timeline


class Adaptor:
    """A provider around another. `inside` wraps the capture's provider the same way, with the same counters."""

    def __init__(self, inner: WorkspaceProvider) -> None:
        self.inner = inner
        self.name = inner.name
        self.safe = inner.safe
        self.lends_tensors = inner.lends_tensors

    def wrap(self, inner: WorkspaceProvider) -> WorkspaceProvider:
        """The same adaptor around a capture's provider."""
        raise NotImplementedError

    def place(self, request: Request, stream: Stream) -> Block | None:
        return self.inner.place(request, stream)

    def undo(self, block: Block, stream: Stream, timeline: Timeline) -> None:
        """Give back a placed block whose preparation failed; what the stream was given to do so far is its use."""
        block.uses, block.events = {stream.id: stream.clock.epoch}, None
        self.inner.give_back(block, stream)

    def give_back(self, block: Block | None, stream: Stream) -> None:
        self.inner.give_back(block, stream)

    def abandon(self, block: Block) -> None:
        self.inner.abandon(block)

    def tensors(self, request: Request, block: Block) -> list[Any]:
        return self.inner.tensors(request, block)

    def fresh(self, request: Request, position: int, stream: Stream) -> Any:
        return self.inner.fresh(request, position, stream)

    def received(self, request: Request, nbytes: int) -> None:
        self.inner.received(request, nbytes)

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        self.inner.returned(request, homes, uses)

    def reserve(self, nbytes: int, declared: Sequence[Request]) -> None:
        self.inner.reserve(nbytes, declared)

    def lock(self, locked: bool) -> None:
        self.inner.lock(locked)

    def lane(self, name: str, *, complete_only: bool) -> Lane | None:
        return self.inner.lane(name, complete_only=complete_only)

    def inside(self, lane: Lane | None) -> WorkspaceProvider:
        return self.wrap(self.inner.inside(lane))

    def trim(self) -> int:
        return self.inner.trim()

    def held(self) -> Held:
        return self.inner.held()

    def close(self) -> None:
        self.inner.close()
