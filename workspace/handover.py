"""A fence the short way: a block on another stream's shelf goes to this one as it is, with its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workspace.block import Block, Shelf

if TYPE_CHECKING:
    from workspace.pool import Pool
    from workspace.request import Request
    from workspace.streams import Stream


def hand_over(pool: Pool, request: Request, stream: Stream) -> Block | None:
    """A block of the request's own size that waits on another stream's shelf; None where the long way has to look.

    The long way's rule is kept: a block whose use is ordered comes first, and one is fenced only where the long way,
    having emptied all shelves, would find none that is. Neither a free block that fits, or neighbours that do together,
    may be there for that, nor a shelved one that is ordered: one of these would be in whatever shelved blocks add. What
    blocks on lease have beyond their requests is left to them (`workspace.refit`).

    Called with the timeline's lock held, outside captures.
    """
    if not pool.hands_over or stream.exact or pool.largest() >= request.nbytes:
        return None
    block = _waiting(pool, request, stream)
    if block is None:
        return None
    shelf = block.shelf
    assert shelf is not None
    try:
        ready = _ready(pool, request, block, stream)
    except BaseException:
        shelf.append(block)
        raise
    if not ready:
        shelf.append(block)
        return None
    pool.shelves[request.keep(block, stream)] = None
    return block


def _waiting(pool: Pool, request: Request, stream: Stream) -> Block | None:
    """A block taken from a shelf of the request: one that is ordered, else the last where none on any shelf is."""
    shelves = [shelf for shelf in list(request.shelves.values()) if shelf]
    for shelf in shelves:
        place = _ordered(pool, shelf, stream)
        if place is not None:
            return _taken(shelf, place)
    if not shelves or any(_ordered(pool, shelf, stream) is not None for shelf in list(pool.shelves)):
        return None
    return _taken(shelves[0], -1)


def _taken(shelf: Shelf, place: int) -> Block | None:
    try:
        return shelf.pop(place)
    except IndexError:
        return None  # a lease took it meanwhile


def _ordered(pool: Pool, shelf: Shelf, stream: Stream) -> int | None:
    """Place of the first block on a shelf whose use precedes the stream's next work."""
    for place, block in enumerate(list(shelf)):
        if pool.timeline.ordered(_stamped(block), stream):
            return place
    return None


def _ready(pool: Pool, request: Request, block: Block, stream: Stream) -> bool:
    """Make the stream's next work come after the block's use; False where it cannot be waited for."""
    timeline = pool.timeline
    if timeline.ordered(_stamped(block), stream):
        pool.elided += block.stream is not stream
        return True
    if not timeline.fenceable(block, stream):
        return False
    owner = _owner(block)
    knows = stream.clock.seen.get(owner.id, 0)
    timeline.fence(block, stream)
    timeline.explanations.fence(request, block, stream, owner, block.epoch, knows)
    return True


def _stamped(block: Block) -> Block:
    """The block with its last use, which on a shelf is one of the shelf's stream."""
    block.uses, block.events = {_owner(block).id: block.epoch}, None
    return block


def _owner(block: Block) -> Stream:
    assert block.stream is not None
    return block.stream
