"""Tensors of a placement are kept by the slab: one that repeats finds them, whatever was cut meanwhile."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, scene
from workspace import block as blocks
from workspace.workspace import Workspace

CROWD = 5 * MIB // 2


def cut(ws: Workspace, nbytes: int) -> tuple[Any, int]:
    """The tensor and the offset of a lease that a crowded pool coalesces at its release."""
    with ws.lease(BYTES, N=nbytes) as lease:
        return lease.x, lease.address


def crowded(strategy: str = "event_fenced") -> Workspace:
    """A pool more than half of which is on lease."""
    _, ws = scene(strategy, steady=True, reserve=4 * MIB)
    strategy_object: Any = ws.strategy_object
    strategy_object.pool.roomy = False
    ws.acquire(OTHER, N=CROWD)
    return ws


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
def test_a_placement_that_repeats_finds_its_tensors(strategy: str) -> None:
    """Between two of them the bytes were part of larger and of smaller blocks."""
    ws = crowded(strategy)
    first, address = cut(ws, MIB)
    second, _ = cut(ws, MIB // 2)
    assert ws.strategy_object.pool.taken == CROWD  # type: ignore[attr-defined]
    assert cut(ws, MIB) == (first, address) or cut(ws, MIB)[0] is first
    assert cut(ws, MIB // 2)[0] is second and second is not first


def test_tensors_that_somebody_holds_pin_the_slab() -> None:
    """Kept tensors do not; the slab goes with the last view."""
    device, ws = scene(steady=True)
    held, _ = cut(ws, SLAB)
    cut(ws, SLAB // 2)
    assert ws.trim() == SLAB and ws.snapshot().retired == SLAB and ws.snapshot().pinned == ("bytes",)
    del held
    gc.collect()
    assert ws.snapshot().retired == 0 and device.counters["alloc"] == 1


def test_of_too_many_placements_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody holds of them pins the slab all the same."""
    monkeypatch.setattr(blocks, "VIEWS_KEPT", 4)
    ws = crowded()
    shelved, _ = cut(ws, 4096)
    first, _ = cut(ws, MIB)
    for number in range(1, 8):
        cut(ws, MIB - 4096 * number)
    (slab,) = ws.strategy_object.pool.slabs  # type: ignore[attr-defined]
    assert len(slab.views) <= 4 and slab.pinned() == ["bytes", "other"]
    assert cut(ws, MIB)[0] is not first
    assert cut(ws, 4096)[0] is shelved  # what waits on a shelf is whole


def test_a_capture_leaves_no_tensors_behind() -> None:
    """Its slabs are its own, over the lane's bytes."""
    _, ws = scene(steady=True, reserve=4 * MIB)
    with ws.on(ws.stream("main")):
        with ws.capture() as capture:
            for nbytes in (MIB, MIB // 2, MIB):
                with ws.lease(BYTES, N=nbytes) as lease:
                    kept = lease.x
        (slab,) = ws.strategy_object.pool.slabs  # type: ignore[attr-defined]
        assert not any(request.owner == "bytes" for _, request in slab.views) and slab.pinned() == ["bytes"]
        del kept
        assert slab.pinned() == []
        capture.graph.release()
