"""Free blocks by size: as a sorted list has them, after any number of changes."""

from __future__ import annotations

import random

import pytest

from workspace.block import Block, Slab
from workspace.free import FreeBlocks


class Bytes:
    """A buffer of a slab."""

    def __init__(self, address: int) -> None:
        self.address, self.nbytes = address, 1 << 30


def test_they_are_in_order_of_size_and_address() -> None:
    """Whatever comes and goes; of equal sizes each is found."""
    choose = random.Random(0)
    slabs = [Slab.over(Bytes(1 << 30)), Slab.over(Bytes(1 << 40))]
    free, model = FreeBlocks(), []
    for step in range(3000):
        if model and choose.random() < 0.45:
            block = model.pop(choose.randrange(len(model)))
            free.remove(block)
        else:
            block = Block(choose.choice(slabs), 256 * step, 256 * choose.randrange(1, 20))
            free.add(block)
            model.append(block)
        wanted = sorted(model, key=lambda one: (one.nbytes, one.address))
        assert list(free) == wanted and len(free) == len(model) and bool(free) == bool(model)
        assert free.largest == (wanted[-1].nbytes if wanted else 0)
        least = 256 * choose.randrange(0, 22)
        assert free.fitting(least) == [one for one in wanted if one.nbytes >= least]


def test_what_is_not_among_them_is_not_removed() -> None:
    """Nor one whose bounds have changed meanwhile: the books would be wrong from then on."""
    slab = Slab.over(Bytes(0))
    free, block = FreeBlocks(), Block(slab, 0, 512)
    with pytest.raises(ValueError, match="not among"):
        free.remove(block)
    free.add(block)
    with pytest.raises(ValueError, match="not among"):
        free.remove(Block(slab, 0, 512))
    block.nbytes = 256
    with pytest.raises(ValueError, match="not among"):
        free.remove(block)
