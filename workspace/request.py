"""Requests: what a strategy is asked to place, computed once for each layout, dims and owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workspace.block import Shelf
from workspace.layout import ALIGNMENT, Extent, Resolved
from workspace.lazy import lazy_type
from workspace.lease import lease_type

if TYPE_CHECKING:
    from workspace.workspace import Workspace


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
        direct, none otherwise.
    direct
        Whether nothing stands between lease and strategy, nor is to be done at each acquire.
    align
        Bytes; the layout starts at the first multiple of it after `lead`.
    """

    __slots__ = (
        "align", "dims", "direct", "extents", "index", "key", "lead", "lease_type", "nbytes", "owner", "payload",
        "ready", "resolved", "shelves", "timeline", "zero",
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
        self.lease_type = lease_type(resolved.layout) if lends else lazy_type(resolved.layout)
        self.direct = bool(workspace.direct and not zero and resolved.nbytes)
        self.shelves: dict[int, Shelf] = {}
        self.ready = self.shelves if self.direct else {}
        self.owner = owner
        self.zero = zero
        self.extents: tuple[Extent, ...] = resolved.extents
        self.index = {extent.name: position for position, extent in enumerate(resolved.extents)}
        self.align = resolved.align
        self.payload = resolved.nbytes
        self.lead = band
        slack = max(resolved.align - ALIGNMENT, 0)
        self.nbytes = resolved.nbytes + slack + 2 * band if resolved.nbytes else 0

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={value}" for name, value in self.resolved.dims)
        return f"{self.owner}({dims}): {self.nbytes} bytes"

    def start(self, address: int) -> int:
        """Offset of the layout's first byte in a block at that address."""
        return -(-(address + self.lead) // self.align) * self.align - address
