"""A change of dims the short way: a block that waits for the same layout at larger dims serves smaller ones, uncut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workspace.block import Block, Shelf

if TYPE_CHECKING:
    from workspace.pool import Pool
    from workspace.request import Request
    from workspace.streams import Stream


class Sizes:
    """Shelves of one layout's requests, whatever their dims, by stream key: those that blocks are on, or come back to.

    One that blocks come to from other streams only, the short way, may be missing.
    """

    __slots__ = ("shelves",)

    def __init__(self) -> None:
        self.shelves: dict[int, dict[Shelf, None]] = {}

    def add(self, shelf: Shelf, stream: Stream) -> None:
        """Note a shelf of the stream."""
        self.shelves.setdefault(stream.key, {})[shelf] = None

    def take(self, nbytes: int, stream: Stream) -> Block | None:
        """The smallest block with so many bytes, of those released last to each shelf of the stream."""
        shelves = self.shelves.get(stream.key, {})
        for shelf in [shelf for shelf in shelves if not shelf.blocks]:
            del shelves[shelf]
        best: Shelf | None = None
        smallest = 0
        for shelf in shelves:
            held = shelf.last()
            if held >= nbytes and (best is None or held < smallest):
                best, smallest = shelf, held
        return None if best is None else best.take(nbytes)


def refit(pool: Pool, request: Request, stream: Stream, tensors: Callable[[Request, Block], list[Any]]) -> Block | None:
    """A block of the request's layout, at least as large, that waits on the stream; None where there is none.

    A program that gets it has what it would have, had it asked for as much as the block was cut for. What the request
    leaves of it, the pool takes back where it empties its shelves.

    Called with the timeline's lock held, outside captures.
    """
    if not pool.refits or not request.direct:
        return None
    block = request.sizes.take(request.nbytes, stream)
    if block is None:
        return None
    before = block.shelf
    assert before is not None
    try:
        found = tensors(request, block)
    except BaseException:
        before.append(block)
        raise
    block.request = request
    block.views = {request: found}  # the slab keeps the others
    pool.refitted(block, request.keep(block, stream), before)
    return block
