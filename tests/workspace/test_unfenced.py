"""The unsafe baseline: one place for each layout, whoever still reads it, at the cost of a look-up."""

from __future__ import annotations

import pytest
import torch

from tests.workspace.scene import scene
from workspace import Layout, spec
from workspace.errors import CapacityError
from workspace.strategies import unfenced

ROWS = Layout("rows", x=spec("T", dtype=torch.uint8))


def test_every_lease_of_a_size_gets_the_same_bytes_at_the_same_time() -> None:
    _, ws = scene("unfenced", steady=True, allow_unsafe=True)
    first, second = ws.acquire(ROWS, T=1024), ws.acquire(ROWS, T=1024)
    with ws.on(ws.stream("aux")):
        third = ws.acquire(ROWS, T=512)
    assert first.address == second.address == third.address
    assert ws.snapshot().allocated == 2 * 1024 + 512
    for lease in (first, second, third):
        lease.release()
    assert ws.snapshot().allocated == 0


def test_a_steady_lease_makes_no_call_and_keeps_its_tensors() -> None:
    device, ws = scene("unfenced", steady=True, allow_unsafe=True)
    seen = set()
    for _ in range(3):
        with ws.lease(ROWS, T=1024) as lease:
            seen.add(id(lease.x))
        before = dict(device.counters)
    assert device.counters == before and len(seen) == 1


def test_a_larger_request_replaces_the_place_also_for_what_is_still_out() -> None:
    """A lease of the old place, released after the growth, is not handed out again; every byte is accounted for."""
    _, ws = scene("unfenced", steady=True, allow_unsafe=True)
    small = ws.lease(ROWS, T=1024)
    with small:
        old = small.address
    small.__enter__()
    large = ws.acquire(ROWS, T=1 << 22)
    assert large.address != old
    small.release()
    assert ws.snapshot().allocated == large._block.nbytes
    with ws.lease(ROWS, T=1024) as again:
        assert again.address == large.address
    large.release()
    assert ws.snapshot().allocated == 0 and ws.snapshot().growths == 1
    ws.close()


def test_a_locked_place_does_not_grow() -> None:
    _, ws = scene("unfenced", steady=True, allow_unsafe=True)
    with ws.lease(ROWS, T=1024):
        pass
    ws.lock()
    with pytest.raises(CapacityError, match="the workspace is locked"):
        ws.acquire(ROWS, T=1 << 22)
    assert ws.snapshot().allocated == 0


def test_ever_new_sizes_leave_a_bounded_number_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfenced, "BLOCKS_KEPT", 8)
    _, ws = scene("unfenced", steady=True, allow_unsafe=True)
    for size in range(40, 0, -1):
        with ws.lease(ROWS, T=size):
            assert len(ws.strategy_object._blocks) <= 8
    assert ws.snapshot().allocated == 0
