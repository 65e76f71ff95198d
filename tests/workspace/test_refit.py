"""A locked pool without room: a layout's block serves its smaller dims as it is, and keeps nothing from others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workspace.bookkeeping import check_books, pooled
from tests.workspace.scene import BYTES, MIB, OTHER, scene
from tests.workspace.test_handover import turns
from workspace import Workspace, refit
from workspace.block import WATCHED, Slab
from workspace.errors import CapacityError, DriverError, LateUse
from workspace.lease import PLAIN
from workspace.pool import Pool
from workspace.simulated import Device
from workspace.strategies.pooled import Pooled

POOLED = ["event_fenced", "per_stream"]
WHOLE = 4 * MIB


def locked(strategy: str = "event_fenced") -> tuple[Device, Workspace]:
    """A pool of just what was declared, the whole of which is cut for the first lease."""
    device, ws = scene(strategy, steady=True)
    ws.declare(BYTES, N=WHOLE)
    ws.reserve()
    ws.lock()
    with ws.lease(BYTES, N=WHOLE) as lease:
        device.launch("whole", writes=[lease.x])
    return device, ws


def searches(ws: Workspace, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> int:
    """How often the pool is searched for leases of these sizes, one after the other."""
    search, found = Pooled._search, [0]

    def counted(self: Pooled, *given: Any) -> Any:
        found[0] += 1
        return search(self, *given)

    monkeypatch.setattr(Pooled, "_search", counted)
    for nbytes in sizes:
        with ws.lease(BYTES, N=nbytes) as lease:
            assert lease.x.numel() == nbytes
    check_books(ws)
    return found[0]


@pytest.mark.parametrize("strategy", POOLED)
@pytest.mark.parametrize("refits", [True, False])
def test_sizes_that_vary_need_no_search(strategy: str, refits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without a look at the layout's other sizes, each change of size is a search."""
    _, ws = locked(strategy)
    if not refits:
        monkeypatch.setattr(refit.Sizes, "take", lambda *_: None)
    sizes = [MIB, MIB + 256, MIB, 3 * MIB, WHOLE, MIB]
    assert searches(ws, monkeypatch, sizes) == (0 if refits else len(sizes))


@pytest.mark.parametrize("strategy", POOLED)
def test_two_sizes_in_turn_have_their_tensors_again(strategy: str) -> None:
    """From the second turn on the short way lends the same tensors, at the address of both."""
    _, ws = locked(strategy)
    here = ws.timeline.current()
    first, second, third = ([turns(ws, here, nbytes=nbytes)[0] for nbytes in (MIB, 2 * MIB)] for _ in range(3))
    assert [tensor for tensor, _ in first] == [tensor for tensor, _ in second] == [tensor for tensor, _ in third]
    assert [short for _, short in third] == [True, True]
    assert len({tensor.data_ptr() for tensor, _ in third}) == 1


def test_the_smallest_block_that_fits_is_taken() -> None:
    """The larger one stays for the larger lease beside it."""
    _, ws = locked()
    with ws.lease(BYTES, N=2 * MIB) as two, ws.lease(BYTES, N=MIB) as one:
        places = [two.address, one.address]
    with ws.lease(BYTES, N=MIB - 256) as one, ws.lease(BYTES, N=2 * MIB - 256) as two:
        assert [two.address, one.address] == places


def test_a_pool_that_may_grow_cuts_as_before() -> None:
    _, ws = locked()
    ws.unlock()
    with ws.lease(BYTES, N=WHOLE - MIB):
        assert pooled(ws).pool.taken == WHOLE - MIB


@pytest.mark.parametrize("strategy", POOLED)
@pytest.mark.parametrize("shortened", [True, False])
def test_what_a_lease_leaves_of_its_block_serves_others(
    strategy: str, shortened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it goes on with its tensors; the books count what it asked for. Control: it keeps the whole block."""
    if not shortened:
        monkeypatch.setattr(Pool, "_shorten", lambda pool: False)
    device, ws = locked(strategy)
    for _ in range(2):  # the long way, and the short one
        with ws.lease(BYTES, N=MIB) as one:
            assert ws.snapshot().allocated == MIB and ws.snapshot().owners["bytes"].allocated == MIB
            tensor = one.x
            if not shortened:
                with pytest.raises(CapacityError):
                    ws.acquire(OTHER, N=3 * MIB)
                return
            with ws.lease(OTHER, N=3 * MIB) as other:
                device.launch("both", writes=[one.x, other.y])
                assert other.address == one.address + MIB and one.x is tensor
                assert ws.snapshot().allocated == WHOLE
                check_books(ws)
        with ws.lease(BYTES, N=WHOLE) as whole:  # declared, so it fits
            device.launch("whole", writes=[whole.x])
    check_books(ws)
    assert device.verdict() == "SAFE"


def forgotten(plain: Callable[..., None]) -> Callable[..., None]:
    """Control: nobody remembers who used what a lease has beyond its request."""

    def refitted(pool: Pool, block: Any, *shelves: Any) -> None:
        plain(pool, block, *shelves)
        if block in pool._longer:
            pool._longer[block] = {}

    return refitted


def test_what_a_lease_leaves_is_not_declared_on_it() -> None:
    """A tensor kept of the larger lease lies beyond the smaller one: its use comes late."""
    _, ws = locked()
    side = ws.stream("side")
    with ws.lease(BYTES, N=2 * MIB) as large:
        front, behind = large.x[:16], large.x[MIB:]
    with ws.lease(BYTES, N=MIB):
        ws.use(front, side)
        with pytest.raises(LateUse):
            ws.use(behind, side)


def test_the_block_of_the_stream_comes_before_another_streams() -> None:
    """In C++, too, where its tensors have not been made for these dims: Python makes them."""
    _, ws = locked()
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(one):
        large = ws.acquire(BYTES, N=WHOLE - MIB)
    with ws.on(two):
        small = ws.acquire(BYTES, N=MIB)
    place = large.address
    small.release()
    large.release()
    event = ws.event()
    event.record(two)
    event.wait(one)
    with ws.on(one):
        for _ in range(3):
            with ws.lease(BYTES, N=MIB) as lease:
                assert lease.address == place
    check_books(ws)


@pytest.mark.parametrize("handed_over", [False, True])
@pytest.mark.parametrize("remembered", [True, False])
def test_what_a_lease_leaves_waits_for_its_last_use(
    handed_over: bool, remembered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which was the larger lease's, on the stream that it was refitted on, wherever the block has gone since."""
    if not remembered:
        monkeypatch.setattr(Pool, "refitted", forgotten(Pool.refitted))
    device, ws = locked()
    one, two, three = ws.timeline.current(), ws.stream("two"), ws.stream("three")
    with ws.on(one):
        ws.lease(BYTES, N=MIB).__enter__().release()
    fences = ws.snapshot().fences
    with ws.on(two if handed_over else one):
        small = ws.acquire(BYTES, N=MIB)
        device.launch("small", writes=[small.x])
    with ws.on(three), ws.lease(OTHER, N=3 * MIB) as other:
        device.launch("other", writes=[other.y])
    small.release()
    assert device.verdict() == ("SAFE" if remembered else "UNSAFE")
    assert ws.snapshot().fences - fences == handed_over + remembered


@pytest.mark.parametrize("shortened", [True, False])
def test_a_crowded_pool_counts_what_leases_asked_for(shortened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they leave of their blocks keeps no other block from its shelf. Control: it counts as taken."""
    _, ws = scene(steady=True, granularity=MIB)
    ws.declare(BYTES, N=WHOLE)
    ws.declare(OTHER, N=WHOLE - MIB)
    ws.reserve()
    ws.lock()
    pool = pooled(ws).pool
    pool.roomy = False
    if not shortened:
        monkeypatch.setattr(Pool, "_shorten", lambda pool: False)
    ws.acquire(BYTES, N=WHOLE).release()
    with ws.lease(BYTES, N=MIB) as one:
        assert one._block is not None and one._block.nbytes == WHOLE
        for _ in range(2):
            with ws.lease(OTHER, N=MIB) as other:
                request = other.request
    assert sum(len(shelf) for shelf in request.shelves.values()) == shortened
    check_books(ws)


def test_large_blocks_leave_a_shelf_on_which_a_small_one_waits() -> None:
    """A shelf may hold blocks of several sizes: those that are large go back, wherever they are on it."""
    _, ws = locked()
    pool = pooled(ws).pool
    pool.roomy = False
    for lease in [ws.acquire(BYTES, N=nbytes) for nbytes in (MIB, 512)]:
        lease.release()
    small, large = (ws.acquire(BYTES, N=256) for _ in range(2))
    large.release()
    small.release()
    (shelf,) = small.request.shelves.values()
    assert [block.nbytes for block in shelf] == [MIB, 512]
    pool.take_back_large()
    assert [block.nbytes for block in shelf] == [512]
    check_books(ws)


def test_tensors_that_cannot_be_made_leave_the_block_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ws = locked()
    ws.lease(BYTES, N=MIB).__enter__().release()

    def broken(*_: Any) -> Any:
        raise DriverError("no tensor", "again")

    with monkeypatch.context() as patch:
        patch.setattr(Pooled, "_built", broken)
        for _ in range(2):
            with pytest.raises(DriverError), ws.lease(BYTES, N=2 * MIB):
                pass
    check_books(ws)
    assert ws.snapshot().allocated == 0 and searches(ws, monkeypatch, [2 * MIB, MIB]) == 0


@pytest.mark.parametrize("state", ["short", "long"])
def test_a_lease_is_shortened_in_either_state(state: str) -> None:
    """Acquired the short way it has its tensors from the block, else a list of its own."""
    device, ws = locked()
    for _ in range(3):
        ws.lease(BYTES, N=MIB).__enter__().release()
        ws.lease(BYTES, N=2 * MIB).__enter__().release()
    lease = ws.lease(BYTES, N=MIB)
    if state == "long":
        lease = lease.on(ws.timeline.current())
    with lease:
        assert (lease._state == PLAIN) is (state == "short")
        tensor = lease.x
        ws.acquire(OTHER, N=3 * MIB).release()
        assert lease.x is tensor and lease._block is not None and lease._block.nbytes == MIB
        device.launch("after", writes=[lease.x])
    assert lease._block.nbytes == MIB
    check_books(ws)
    assert device.verdict() == "SAFE"


def test_a_slab_looks_seldom_for_tensors_that_it_has_let_go_of() -> None:
    """Of those that somebody holds, once for each time that they are twice as many."""
    slab: Slab = pooled(locked()[1]).pool.slabs[0]
    held, looks = [torch.empty(1) for _ in range(16 * WATCHED)], 0
    for tensor in held:
        before = slab._watched
        slab.watch("somebody", [tensor])
        looks += slab._watched is not before
    assert looks == 4 and len(slab._watched) == len(held)
    del held, tensor
    for _ in range(16 * WATCHED + 1):
        slab.watch("nobody", [torch.empty(1)])
    assert len(slab._watched) <= WATCHED + 1 and slab.pinned() == []
