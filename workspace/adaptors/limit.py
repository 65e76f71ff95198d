"""Limit: refuse a lease above so many bytes on loan, whatever the pool could still hold."""

from __future__ import annotations

from typing import Any

from workspace.adaptors.adaptor import Adaptor
from workspace.block import Block, Uses
from workspace.errors import CapacityError
from workspace.provider import Homes, WorkspaceProvider
from workspace.request import Request
from workspace.streams import Stream


class Limit(Adaptor):
    """Parameters: the provider inside, and the most bytes that may be on loan at once."""

    def __init__(self, inner: WorkspaceProvider, nbytes: int) -> None:
        super().__init__(inner)
        self.nbytes = nbytes
        self._lent = [0]

    def wrap(self, inner: WorkspaceProvider) -> WorkspaceProvider:
        wrapped = Limit(inner, self.nbytes)
        wrapped._lent = self._lent
        return wrapped

    def place(self, request: Request, stream: Stream) -> Block | None:
        self._check(request.owner, request.nbytes if self.lends_tensors else 0)
        block = self.inner.place(request, stream)
        if block is not None:
            self._lent[0] += block.nbytes
        return block

    def give_back(self, block: Block | None, stream: Stream) -> None:
        if block is not None:
            self._lent[0] -= block.nbytes
        self.inner.give_back(block, stream)

    def abandon(self, block: Block) -> None:
        self._lent[0] -= block.nbytes
        self.inner.abandon(block)

    def fresh(self, request: Request, position: int, stream: Stream) -> Any:
        self._check(request.owner, request.extents[position].nbytes)
        return self.inner.fresh(request, position, stream)

    def received(self, request: Request, nbytes: int) -> None:
        self._lent[0] += nbytes
        self.inner.received(request, nbytes)

    def returned(self, request: Request, homes: Homes, uses: Uses) -> None:
        self._lent[0] -= sum(request.extents[position].nbytes for position in homes)
        self.inner.returned(request, homes, uses)

    def _check(self, owner: str, nbytes: int) -> None:
        if self._lent[0] + nbytes > self.nbytes:
            raise CapacityError(
                f"{owner} asks {nbytes} bytes, {self._lent[0]} are on loan, and limit={self.nbytes} bytes",
                "raise `limit`, or release leases first",
                owner=owner, asked=nbytes, allocated=self._lent[0], capacity=self.nbytes, setting="limit",
            )  # fmt: skip
