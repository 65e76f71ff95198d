"""What must hold of a pool's books at any time."""

from __future__ import annotations

from typing import Any

from workspace import Workspace
from workspace.block import FREE, TAKEN
from workspace.strategies.pooled import Pooled


def pooled(ws: Workspace) -> Pooled:
    """The strategy, which has a pool."""
    strategy: Any = ws.strategy_object
    assert isinstance(strategy, Pooled)
    return strategy


def check_books(ws: Workspace) -> None:
    """Every byte of every slab lies in one block; free lists hold the free blocks and no others; sums agree."""
    pool = pooled(ws).pool
    listed = {id(block) for blocks in pool.free.values() for block in blocks}
    taken = 0
    found = 0
    for slab in pool.slabs:
        end = 0
        before = None
        for block in slab.blocks():
            assert block.offset == end and block.prev is before and block.slab is slab
            assert block.nbytes >= 0 and block.offset % 256 == 0
            assert block.state in (FREE, TAKEN)
            assert (id(block) in listed) == (block.state == FREE)
            found += block.state == FREE
            taken += block.nbytes if block.state == TAKEN else 0
            end, before = end + block.nbytes, block
        assert end == slab.nbytes
    assert found == len(listed)
    footprints = sum(pooled(ws).lanes().values())
    assert pool.taken == taken - footprints
    held = pooled(ws).held()
    assert held.reserved >= sum(slab.nbytes for slab in pool.slabs)
    assert held.peak_reserved >= held.reserved


def check_coalesced(ws: Workspace) -> None:
    """Once shelves are empty, no two free neighbours of one home are apart, but for those of different streams."""
    pool = pooled(ws).pool
    pool.consolidate()
    for slab in pool.slabs:
        blocks = slab.blocks()
        for block, after in zip(blocks, blocks[1:], strict=False):
            if block.state == after.state == FREE and block.home == after.home:
                assert pool.by_streams and len(block.uses.keys() | after.uses.keys()) > 1
