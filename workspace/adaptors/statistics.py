"""Statistics: requests counted and bytes accounted by owner, with the call site of each lease."""

from __future__ import annotations

import attrs

from workspace.adaptors.adaptor import Adaptor
from workspace.block import Block, Uses
from workspace.explain import call_site
from workspace.provider import Homes, WorkspaceProvider
from workspace.request import Request
from workspace.streams import Stream


@attrs.define
class OwnerBytes:
    """Bytes of one owner on loan now, the largest so far, and the number of its requests."""

    allocated: int = 0
    peak: int = 0
    acquires: int = 0


class Statistics(Adaptor):
    """Counts by owner and in all; shared with the providers of captures."""

    def __init__(self, inner: WorkspaceProvider) -> None:
        super().__init__(inner)
        self.owners: dict[str, OwnerBytes] = {}
        self.total = OwnerBytes()

    def wrap(self, inner: WorkspaceProvider) -> WorkspaceProvider:
        wrapped = Statistics(inner)
        wrapped.owners, wrapped.total = self.owners, self.total
        return wrapped

    def place(self, request: Request, stream: Stream) -> Block | None:
        block = self.inner.place(request, stream)
        owner = self._owner(request)
        owner.acquires += 1
        self.total.acquires += 1
        if block is not None:
            self._lent(owner, block.nbytes)
            block.site = call_site()
        return block

    def give_back(self, block: Block | None, stream: Stream) -> None:
        if block is not None and block.request is not None:
            self._back(self._owner(block.request), block.nbytes)
        self.inner.give_back(block, stream)

    def abandon(self, block: Block) -> None:
        if block.request is not None:
            self._back(self._owner(block.request), block.nbytes)
        self.inner.abandon(block)

    def received(self, request: Request, nbytes: int) -> None:
        self._lent(self._owner(request), nbytes)
        self.inner.received(request, nbytes)

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        self._back(self._owner(request), sum(request.extents[position].nbytes for position in homes))
        self.inner.returned(request, homes, uses)

    def _owner(self, request: Request) -> OwnerBytes:
        found = self.owners.get(request.owner)
        if found is None:
            found = self.owners[request.owner] = OwnerBytes()
        return found

    def _lent(self, owner: OwnerBytes, nbytes: int) -> None:
        for one in (owner, self.total):
            one.allocated += nbytes
            if one.allocated > one.peak:
                one.peak = one.allocated

    def _back(self, owner: OwnerBytes, nbytes: int) -> None:
        owner.allocated -= nbytes
        self.total.allocated -= nbytes
