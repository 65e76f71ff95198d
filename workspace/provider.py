"""The interface that model code, adaptors and third-party strategies share: place a request, give a block back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from workspace.block import Block, Uses
    from workspace.config import WorkspaceConfig
    from workspace.lane import Lane
    from workspace.request import Request
    from workspace.streams import Stream
    from workspace.timeline import Timeline


Homes = dict[int, tuple[Any, "Stream"]]
"""Position in the request -> tensor from the framework's allocator, and the stream it was allocated on."""


@attrs.frozen
class Held:
    """Bytes a provider holds, as `WorkspaceProvider.held` reports them.

    Attributes
    ----------
    allocated
        Bytes out on lease, rounding and guard bands included.
    reserved, peak_reserved
        Bytes obtained from the framework's allocator, retired slabs included.
    retired
        Bytes of slabs given up whose memory lives on because a tensor or a graph pins it.
    pinned
        Owners of the tensors that pin retired slabs.
    slabs
        Size of each slab in bytes.
    growths
        Slabs obtained after `reserve`, or without one.
    """

    allocated: int = 0
    reserved: int = 0
    peak_reserved: int = 0
    retired: int = 0
    pinned: tuple[str, ...] = ()
    slabs: tuple[int, ...] = ()
    growths: int = 0


@runtime_checkable
class WorkspaceProvider(Protocol):
    """A strategy: where a request's bytes come from, and what happens to them at release.

    Every method is called with the timeline's lock held. A stream is where the *next* work on the bytes goes. The one
    rule binds every safe provider: a block is returned only if all its last uses precede that work.

    Attributes
    ----------
    name
        As in the config flag.
    safe
        Whether the one rule is kept; an unsafe provider needs ``allow_unsafe=True``.
    lends_tensors
        True when `place` returns blocks of slab bytes; False when tensors come one by one from the framework's
        allocator (`caching`, `upstream`) and `place` returns None.
    """

    name: str
    safe: bool
    lends_tensors: bool

    def place(self, request: Request, stream: Stream) -> Block | None:
        """Exclusive bytes for a request, ready for the stream's next work.

        Raises `CapacityError` (state unchanged) when neither another block, a fence nor growth is possible.
        """

    def give_back(self, block: Block | None, stream: Stream) -> None:
        """Take a block back; ``block.uses`` holds its last uses, the acquiring stream's included."""

    def abandon(self, block: Block) -> None:
        """A lease of a capture ended with it: account for the block, whose bytes stay as they are."""

    def tensors(self, request: Request, block: Block) -> list[Any]:
        """Tensors of the request's extents over a placed block, kept for the next lease of the same block."""

    def fresh(self, request: Request, position: int, stream: Stream) -> Any:
        """One tensor of a request from the framework's allocator (only when `lends_tensors` is False)."""

    def received(self, request: Request, nbytes: int) -> None:
        """A lease took in so many bytes, from `fresh` or from an op (only when `lends_tensors` is False)."""

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        """A lease of such tensors ends with these last uses; `homes` says on which stream each was allocated."""

    def reserve(self, nbytes: int, declared: Sequence[Request]) -> None:
        """Hold at least this many bytes, what the declared requests add up to, so that later ones need no growth."""

    def lock(self, locked: bool) -> None:
        """Forbid (or allow again) growth."""

    def lane(self, name: str, *, complete_only: bool) -> Lane | None:
        """The lane of that name, made at first use; None for a provider that keeps no bytes.

        `complete_only`: its graphs may be replayed without the library's knowledge, so that it takes only bytes whose
        uses the host has seen complete.
        """

    def inside(self, lane: Lane | None) -> WorkspaceProvider:
        """A provider of the same strategy for one capture, whose bytes come from the lane's footprint."""

    def trim(self) -> int:
        """Give idle slabs back to the framework's allocator; returns the bytes."""

    def held(self) -> Held:
        """What the provider holds now."""

    def close(self) -> None:
        """Give everything back."""


class StrategyFactory(Protocol):
    """What a strategy's registry entry calls."""

    def __call__(self, timeline: Timeline, config: WorkspaceConfig) -> WorkspaceProvider: ...
