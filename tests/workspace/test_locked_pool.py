"""A locked pool of exactly what was declared has a place for it, whatever was leased at smaller dims or elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.workspace.bookkeeping import check_books
from tests.workspace.scene import BYTES, MIB, OTHER, scene
from workspace import Layout, Workspace, spec
from workspace.errors import CapacityError
from workspace.pool import Pool
from workspace.simulated import Device
from workspace.strategies.pooled import Pooled

WARM = Layout("warm-up", w=spec("N", dtype=torch.uint8))


def smaller_dims(device: Device, ws: Workspace) -> None:
    """A lease at less than its declared size, cut behind its own block that waits on a shelf."""
    with ws.lease(BYTES, N=4 * MIB) as one:
        device.launch("one", writes=[one.x])
    with ws.lease(BYTES, N=2 * MIB) as one, ws.lease(OTHER, N=9 * MIB) as other:
        device.launch("both", writes=[one.x, other.y])


def another_stream(device: Device, ws: Workspace) -> None:
    """Declared dims, but a stream's block waits on a shelf while another stream leases both."""
    with ws.on(ws.stream("one")), ws.lease(BYTES, N=4 * MIB) as one:
        device.launch("one", writes=[one.x])
    with ws.on(ws.stream("other")), ws.lease(BYTES, N=4 * MIB) as one, ws.lease(OTHER, N=9 * MIB) as other:
        device.launch("both", writes=[one.x, other.y])


def locked(strategy: str) -> tuple[Device, Workspace]:
    device, ws = scene(strategy)
    ws.declare(BYTES, N=4 * MIB)
    ws.declare(OTHER, N=9 * MIB)
    ws.reserve()
    ws.lock()
    return device, ws


CASES = [
    ("event_fenced", smaller_dims),
    ("event_fenced", another_stream),
    ("per_stream", smaller_dims),
]  # a sub-pool for each stream keeps what one stream used from the others


@pytest.mark.parametrize(("strategy", "program"), CASES)
def test_what_was_declared_fits(strategy: str, program: Any) -> None:
    device, ws = locked(strategy)
    program(device, ws)
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize(("strategy", "program"), CASES)
def test_cut_behind_what_waits_on_shelves_it_would_not(
    strategy: str, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: shelves are emptied only once nothing fits."""
    device, ws = locked(strategy)
    monkeypatch.setattr(ws.provider, "_largest_declared", 0)
    with pytest.raises(CapacityError):
        program(device, ws)


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_a_small_step_keeps_no_place_from_the_largest(
    strategy: str, late: bool, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all that was declared lies side by side, each layout's first block is as large as it was declared.

    Control: cut for a small step, a block stands in the middle of what the largest step needs.
    """
    if not whole:
        monkeypatch.setattr(Pooled, "_whole", lambda *_: None)
    device, ws = scene(strategy, steady=True)
    if late:  # a step that nobody has declared leaves as much as both need
        with ws.lease(WARM, N=8 * MIB) as warm:
            warm.use(ws.stream("aux"))  # else its block would wait on a shelf
        ws.synchronize()
    for layout in (BYTES, OTHER)[late:]:
        ws.declare(layout, N=4 * MIB)
    ws.reserve()
    ws.lock()
    if late:
        ws.declare(BYTES, N=4 * MIB)
    assert ws.snapshot().reserved == 8 * MIB
    with ws.lease(BYTES, N=MIB) as small, ws.lease(OTHER, N=4 * MIB) as large:
        device.launch("small", writes=[small.x, large.y])
        assert ws.snapshot().allocated == 5 * MIB
    with ExitStack() as step:
        if not whole:
            step.enter_context(pytest.raises(CapacityError))
        large = step.enter_context(ws.lease(OTHER, N=4 * MIB))
        largest = step.enter_context(ws.lease(BYTES, N=4 * MIB))
        device.launch("largest", writes=[large.y, largest.x])
    check_books(ws)
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
def test_another_phase_may_be_declared_after_the_lock(strategy: str) -> None:
    """What waits on shelves then is taken back for it: together they no longer fit."""
    device, ws = scene(strategy, steady=True)
    ws.declare(OTHER, N=9 * MIB, phase="a")
    ws.reserve()
    ws.lock()
    for _ in range(2):
        with ws.lease(OTHER, N=9 * MIB) as other:
            device.launch("other", writes=[other.y])
        ws.declare(BYTES, N=10 * MIB, phase="b")
        for nbytes in (4 * MIB, 10 * MIB):
            with ws.lease(BYTES, N=nbytes) as one:
                device.launch("one", writes=[one.x])
    assert not ws.provider.pool.roomy  # type: ignore[attr-defined]
    check_books(ws)
    assert device.verdict() == "SAFE" and ws.snapshot().reserved == 10 * MIB


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
@pytest.mark.parametrize("at_end", [True, False])
def test_dims_below_the_largest_need_one_search_each(
    strategy: str, at_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all that was declared lies side by side, of layouts without blocks of their own: each is cut where it
    leaves the largest its place.

    Control: cut at the front only, they take it from one another, each time.
    """
    monkeypatch.setattr(Pooled, "_whole", lambda *_: None)
    search, leaves_room, found = Pooled._search, Pool.leaves_room, [0]

    def counted(self: Pooled, *given: Any) -> Any:
        found[0] += 1
        return search(self, *given)

    monkeypatch.setattr(Pooled, "_search", counted)
    if not at_end:
        monkeypatch.setattr(
            Pool, "leaves_room", lambda pool, block, nbytes, wanted, _: leaves_room(pool, block, nbytes, wanted)
        )
    device, ws = scene(strategy, steady=True)
    ws.declare(BYTES, N=9 * MIB, phase="a")
    ws.declare(OTHER, N=4 * MIB, phase="b")
    ws.reserve(spare=4 * MIB)
    ws.lock()
    for _ in range(3):
        with ws.lease(BYTES, N=7 * MIB) as one:
            device.launch("one", writes=[one.x])
        with ws.lease(OTHER, N=3 * MIB) as other:
            device.launch("other", writes=[other.y])
    assert found[0] == (2 if at_end else 6)
    with ws.lease(OTHER, N=3 * MIB) as other, ws.lease(BYTES, N=9 * MIB) as one:  # declared, so it fits
        device.launch("both", writes=[one.x, other.y])
    check_books(ws)
    assert device.verdict() == "SAFE"
