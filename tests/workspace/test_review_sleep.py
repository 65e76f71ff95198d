"""Sleep under work in flight, with owners, and a wake that fails half-way."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, MIB, SLAB, scene
from workspace import Layout, spec
from workspace.errors import OutOfMemory, SleepError
from workspace.simulated import Device, InOrder
from workspace.simulated.mapping import Mapping
from workspace.testing.schedules import SLOW, Delays
from workspace.timeline import Timeline

NOTHING = Layout("nothing", x=spec(0, dtype=torch.uint8))
EITHER: tuple[tuple[Layout, dict[str, Any]], ...] = (BYTES, {"N": SLAB}), (NOTHING, {})


@pytest.mark.parametrize("waited", [True, False])
def test_memory_goes_when_the_device_is_idle(monkeypatch: pytest.MonkeyPatch, waited: bool) -> None:
    """A released lease may be read still. The simulated device would wait by itself; CUDA's does not."""
    device = Device(execution="deferred", schedule=Delays(InOrder()))
    ws = workspace.create("event_fenced", device=device, restorable=True)
    ran: list[int] = []
    before: list[int] = []
    unmap = Mapping.unmap

    def looked(mapping: Mapping) -> None:
        before.append(len(ran))
        unmap(mapping)

    monkeypatch.setattr(Mapping, "unmap", looked)
    if not waited:
        monkeypatch.setattr(Timeline, "synchronize", lambda *_: None)
    with ws.on(ws.stream("side")), ws.lease(BYTES, N=MIB) as lease:
        device.launch(SLOW)
        device.launch("read", reads=[lease.x], fn=lambda: ran.append(1))
    ws.sleep()
    assert before == [int(waited)] and ran == [1]


@pytest.mark.parametrize("restorable", [False, True])
def test_a_wake_that_fails_at_an_owner_wakes_nobody(restorable: bool) -> None:
    """What the first had taken goes back, and everything sleeps on until there is memory for all."""
    device = Device(memory="host", capacity=64 * MIB)
    settings: dict[str, Any] = {"owners": {"draft": "per_stream"}, "restorable": restorable}
    ws = workspace.create("event_fenced", device=device, **settings)
    both = ws, ws.owner("draft")
    for one in both:
        with one.lease(BYTES, N=20 * MIB):
            pass
    held = [one.snapshot().reserved for one in both]
    assert ws.sleep() == sum(held)
    beside = device.malloc(30 * MIB)
    with pytest.raises(OutOfMemory):
        ws.wake()
    assert all(one.asleep and not one.snapshot().reserved for one in both)
    assert device.memory.used == 30 * MIB
    for one in both:
        with pytest.raises(SleepError), one.lease(BYTES, N=MIB):
            pass
    device.free(beside)
    assert ws.wake() == sum(held) and [one.snapshot().reserved for one in both] == held
    for one in both:
        with one.lease(BYTES, N=20 * MIB):
            pass
    assert [one.snapshot().reserved for one in both] == held


def test_an_owner_that_shares_the_pool_lends_nothing_either() -> None:
    """Not even a lease without bytes, which no pool would refuse."""
    _, ws = scene(steady=True)
    draft = ws.owner("draft")
    for layout, dims in EITHER:
        with draft.lease(layout, **dims):
            pass
    ws.sleep()
    for layout, dims in EITHER:
        with pytest.raises(SleepError), draft.lease(layout, **dims):
            pass
    ws.wake()
    for layout, dims in EITHER:
        with draft.lease(layout, **dims):
            pass


def test_an_abandoned_fill_keeps_its_copy() -> None:
    """A fill whose block raised after the upload: the copy it began is waited for before the slot is filled again."""
    device = Device(execution="deferred", schedule=Delays(InOrder()))
    ws = workspace.create("event_fenced", device=device)
    staging, out = ws.staging("ids", 16, slots=1), ws.driver.empty((16,), torch.uint8, 0)
    device.launch(SLOW)
    with contextlib.suppress(KeyError), staging.fill() as slot:
        slot.memory[:] = bytes([1]) * 16
        slot.upload(out)
        raise KeyError
    with staging.fill() as slot:
        slot.memory[:] = bytes([2]) * 16
    device.synchronize()
    assert out.tolist() == [1] * 16
