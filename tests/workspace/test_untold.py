"""`caching` where the allocator cannot be told of a use: its bytes are kept, not handed to their home stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workspace.scene import BYTES, SLAB, scene
from workspace.errors import DriverError, SleepError
from workspace.strategies.caching import Caching


def failing(*_: object) -> None:
    raise DriverError("out of order")


def declared(device: Any, ws: Any) -> None:
    """Read on a side stream, which is declared."""
    with ws.lease(BYTES, N=SLAB) as lease:
        x = lease.allocate()[0]
        ws.use(lease, ws.stream("side"))
        with ws.on(ws.stream("side")):
            device.launch("late", reads=[x])


def from_elsewhere(device: Any, ws: Any) -> None:
    """Allocated while the side stream is current, read on the lease's own."""
    main = ws.stream("main")
    with ws.lease(BYTES, N=SLAB) as lease:
        with ws.on(ws.stream("side")):
            x = lease.allocate()[0]
        with ws.on(main):
            device.launch("late", reads=[x])


def ends(steady: bool, leak: Callable[[Any, Any], None]) -> tuple[str, Any]:
    """The verdict after the release failed, and both streams wrote to all that is free."""
    device, ws = scene("caching", steady=steady)
    with ws.on(ws.stream("main")), pytest.MonkeyPatch.context() as broken:
        with pytest.raises(DriverError, match="out of order"), broken.context() as failed:
            failed.setattr(ws.driver, "record_use", failing)
            leak(device, ws)
        for name in ("main", "side"):
            with ws.on(ws.stream(name)), ws.lease(BYTES, N=SLAB) as lease:
                device.launch("next", writes=[lease.allocate()[0]])
    return device.verdict(), ws


CASES = pytest.mark.parametrize("leak", [declared, from_elsewhere])


@CASES
@pytest.mark.parametrize("steady", [True, False], ids=["steady", "judged"])
def test_bytes_that_the_allocator_was_not_told_of_stay(leak: Callable[[Any, Any], None], steady: bool) -> None:
    verdict, ws = ends(steady, leak)
    assert verdict == "SAFE" and ws.snapshot().allocated == SLAB
    ws.close()
    assert not ws.strategy_object.untold


@CASES
def test_dropped_they_race(leak: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Caching, "keep", lambda strategy, homes: None)
    assert ends(False, leak)[0] == "UNSAFE"


@CASES
@pytest.mark.parametrize("awaited", [True, False])
def test_they_go_once_the_host_has_seen_the_uses(leak: Callable[[Any, Any], None], awaited: bool) -> None:
    """After a synchronisation nothing is on loan, so that the workspace may sleep."""
    _, ws = ends(True, leak)
    if awaited:
        ws.synchronize()
        assert ws.snapshot().allocated == 0 and not ws.strategy_object.untold
        ws.sleep()
        ws.wake()
    else:
        with pytest.raises(SleepError, match="bytes are on loan"):
            ws.sleep()
        assert ws.trim() == 0 and ws.snapshot().allocated == SLAB
    ws.close()
