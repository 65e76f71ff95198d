"""Requests: what a strategy is asked to place, computed once for each layout, dims and owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workspace.block import TAKEN, Block, Shelf, Slab, first_three
from workspace.layout import ALIGNMENT, Extent, Resolved
from workspace.lazy import lazy_type
from workspace.lease import lease_type
from workspace.ranged import ranged_type

if TYPE_CHECKING:
    from workspace.explain import Note, Tally
    from workspace.pool import Pool
    from workspace.streams import Stream
    from workspace.workspace import Workspace


POSITIONS_KEPT = 64


class Request:
    """One layout with all dims given, on behalf of one owner.

    Equality is identity: the facade keeps one object for each (layout, dims), so that blocks can remember the tensors
    they built for it.

    Attributes
    ----------
    nbytes
        Bytes to place, alignment slack, guard bands and all.
    lead
        Bytes before the first tensor that belong to a guard band.
    key, timeline
        The workspace's: the key tells it from others without keeping it alive.
    lease_type
        The `Lease` with the layout's tensors as properties.
    shelves, ready
        The provider's shelves by stream key, and those a lease may take from by itself: the same where the request is
        direct, or without bytes, none otherwise.
    sizes
        The shelves of its layout's requests, whatever their dims.
    lender
        The pool that has put a block on a shelf of it; None before.
    notes, noted
        Fences noted so far, and where the last was counted; see `workspace.explain.Explanations.fence`.
    direct
        Whether nothing stands between lease and strategy, nor is to be done at each acquire.
    align
        Bytes; the layout starts at the first multiple of it after `lead`.
    """

    __slots__ = (
        "_positions", "align", "dims", "direct", "extents", "index", "key", "lead", "lease_type", "lender", "nbytes",
        "__weakref__", "noted", "notes", "owner", "payload", "ready", "resolved", "shelves", "sizes", "timeline",
        "zero",
    )  # fmt: skip

    def __init__(
        self, resolved: Resolved, owner: str, workspace: Workspace, key: object, *, zero: bool = False, band: int = 0
    ) -> None:
        self.resolved = resolved
        # Not the workspace itself: blocks remember requests, and would keep a dropped workspace alive.
        self.key = key
        self.timeline = workspace.timeline
        self.dims = dict(resolved.dims)
        lends = workspace.provider.lends_tensors
        layout = resolved.layout
        if workspace.config.nvtx:
            self.lease_type = ranged_type(layout, lends)
        else:
            self.lease_type = lease_type(layout) if lends else lazy_type(layout)
        self.direct = bool(workspace.direct and not zero and resolved.nbytes)
        self.shelves: dict[int, Shelf] = {}
        kept = self.direct or (workspace.direct and lends and not zero and not resolved.nbytes)
        self.ready = self.shelves if kept else {}
        self.sizes = workspace.sizes(layout)
        self.lender: Pool | None = None
        self.notes: list[Note] = []
        self.noted: Tally | None = None
        self.owner = owner
        self.zero = zero
        self.extents: tuple[Extent, ...] = resolved.extents
        self.index = {extent.name: position for position, extent in enumerate(resolved.extents)}
        self._positions: dict[tuple[str, ...], tuple[int, ...]] = {}
        self.align = resolved.align
        self.payload = resolved.nbytes
        self.lead = band
        slack = max(resolved.align - ALIGNMENT, 0)
        self.nbytes = resolved.nbytes + slack + 2 * band if resolved.nbytes else 0

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={value}" for name, value in self.resolved.dims)
        return f"{self.owner}({dims}): {self.nbytes} bytes"

    def positions(self, names: tuple[str, ...]) -> tuple[int, ...]:
        """Positions of tensors by name, of all without names. Raises `KeyError` for a name the layout lacks."""
        found = self._positions.get(names)
        if found is None:
            found = tuple(self.index[name] for name in names) if names else tuple(self.index.values())
            if len(self._positions) < POSITIONS_KEPT:
                self._positions[names] = found
        return found

    def start(self, address: int) -> int:
        """Offset of the layout's first byte in a block at that address."""
        return -(-(address + self.lead) // self.align) * self.align - address

    def shelve(self, block: Block, stream: Stream) -> Shelf:
        """Put a block, used last on this stream only, where the next such request on it finds it; returns the shelf."""
        shelf = self.keep(block, stream)
        block.epoch = block.uses[stream.id]
        shelf.append(block)
        return shelf

    def keep(self, block: Block, stream: Stream) -> Shelf:
        """Make a block that is out on lease come back to the shelf of this request and stream; returns the shelf."""
        shelf = self.shelves.get(stream.key)
        if shelf is None:
            shelf = self.shelves[stream.key] = Shelf()
        if block.shelf is not shelf:
            block.leave_shelf()
            block.shelf = shelf
            shelf.blocks += 1
        block.stream = stream
        # With something between lease and strategy, a lease must not return the block by itself.
        block.lent = block.views.get(self, []) if self.ready is self.shelves else []
        block.first = first_three(block.lent)
        return shelf

    def without_bytes(self, stream: Stream) -> Block:
        """A new block of no bytes, out on a lease, that comes back to the stream's shelf: no provider knows of it."""
        driver = self.timeline.driver
        buffer = self.timeline.call(driver.alloc, 0, stream.key)
        with torch.inference_mode(False):
            tensors = [driver.tensor(buffer, 0, one.shape, one.dtype) for one in self.extents]
        block = Slab(buffer, 0, 0).first
        block.views[self] = tensors
        block.state, block.request = TAKEN, self
        self.keep(block, stream)
        return block

    def unshelve(self, stream: Stream) -> Block | None:
        """A block that waits for this request on the stream; None where there is none, and inside captures."""
        shelf = self.shelves.get(stream.key) if stream.capture is None else None
        if shelf:
            try:
                return shelf.pop()
            except IndexError:
                pass  # a lease took the last one without the lock
        return None
