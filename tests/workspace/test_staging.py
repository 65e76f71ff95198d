"""Staging: slots are filled in turn, each only when the copies out of it are over."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, MIB, SLAB, host
from workspace import Layout, spec
from workspace.errors import (
    ArgumentError,
    CapacityError,
    CaptureError,
    DriverError,
    LayoutError,
    LeaseReleased,
    SizeError,
    WorkspaceError,
)
from workspace.simulated import Device, InOrder
from workspace.testing.schedules import SLOW, Delays


def deferred() -> tuple[Device, workspace.Workspace]:
    """A device that runs nothing before somebody waits for it."""
    device = Device(execution="deferred", schedule=Delays(InOrder()))
    return device, workspace.create("event_fenced", device=device)


def test_an_upload_brings_the_bytes() -> None:
    """From an offset on, to a tensor of any dtype, on the current stream or another."""
    _, ws = host()
    staging = ws.staging("ids", 64)
    out = ws.driver.empty((4,), torch.int32, 0)
    with staging.fill() as slot:
        slot.memory[8:24] = memoryview(b"".join(value.to_bytes(4, "little") for value in (1, 2, 3, 4)))
        slot.upload(out, offset=8)
    assert out.tolist() == [1, 2, 3, 4]
    with staging.fill() as slot:
        slot.memory[:16] = bytes(16)
        slot.upload(out, stream=ws.stream("side"))
    assert out.tolist() == [0] * 4


@pytest.mark.parametrize("strategy", ["caching", "event_fenced", "per_stream", "upstream", "unfenced"])
def test_an_upload_fills_a_lease(strategy: str) -> None:
    """A lease's tensor, or the slot that stands for it where ops allocate what they return."""
    _, ws = host(strategy, allow_unsafe=True)
    with ws.lease(BYTES, N=32) as lease:
        with ws.staging("ids", 32).fill() as slot:
            slot.memory[:] = bytes(range(32))
            slot.upload(lease.x)
        assert [*bytes(lease.allocate("x")[0].tolist())] == list(range(32))


def test_the_host_runs_as_many_copies_ahead_as_there_are_slots() -> None:
    """Nothing is waited for before the ring is round; then the oldest copy is, and no later one."""
    device, ws = deferred()
    staging = ws.staging("ids", 16, slots=3)
    out = ws.driver.empty((16,), torch.uint8, 0)
    device.launch(SLOW)
    waits, seen = device.counters["synchronize"], []
    for value in range(5):
        with staging.fill() as slot:
            seen.append(slot)
            slot.memory[:] = bytes([value]) * 16
            slot.upload(out)
        waited = device.counters["synchronize_event"] + device.counters["synchronize"] - waits
        assert bool(waited) == (value >= 3), (value, device.counters)
    assert seen[:3] == [*dict.fromkeys(seen)] and seen[3:] == seen[:2]


@pytest.mark.parametrize("waited", [True, False])
def test_a_copy_that_is_waited_for_is_known_to_be_over(waited: bool) -> None:
    """What the host has seen complete may go to any stream: the clocks learn of the wait, and of no more."""
    device, ws = deferred()
    main, side = ws.stream("main"), ws.stream("side")
    staging = ws.staging("ids", 16, slots=1)
    out = ws.driver.empty((16,), torch.uint8, main.key)
    with ws.on(main):
        with ws.lease(BYTES, N=SLAB) as lease:
            device.launch("write", writes=[lease.x])
        with staging.fill() as slot:
            slot.upload(out)
        if waited:
            with staging.fill():
                pass
    with ws.on(side), ws.lease(BYTES, N=SLAB) as lease:
        device.launch("write again", writes=[lease.x])
    assert ws.snapshot().fences == (0 if waited else 1)
    assert device.verdict() == "SAFE"


def test_a_copy_without_an_event_is_waited_for_with_its_stream() -> None:
    """The copy is under way and its event could not be recorded: the slot is not filled before the stream is idle."""
    device, ws = deferred()
    staging = ws.staging("ids", 16, slots=1)
    out = ws.driver.empty((16,), torch.uint8, 0)
    driver: Any = ws.driver
    record = driver.record

    def failing(event: int, stream: int) -> None:
        raise DriverError("cuEventRecord failed", "try again", code=1, verb="cuEventRecord", sticky=False)

    with pytest.raises(DriverError), staging.fill() as slot:
        slot.memory[:] = b"\1" * 16
        driver.record = failing
        slot.upload(out)
    driver.record = record
    with staging.fill() as slot:
        slot.memory[:] = b"\2" * 16
    device.synchronize()
    assert out.tolist() == [1] * 16


def test_slots_being_filled_are_nobody_elses() -> None:
    """Two threads fill different slots; a third is refused, and served once one is back, also after an error."""
    _, ws = host()
    staging = ws.staging("ids", 16, slots=2)
    holding, done = threading.Event(), threading.Event()

    def filling() -> None:
        with staging.fill():
            holding.set()
            done.wait(10)

    thread = threading.Thread(target=filling)
    thread.start()
    assert holding.wait(10)
    with pytest.raises(KeyError), staging.fill():
        with pytest.raises(CapacityError, match="slots"), staging.fill():
            pass
        raise KeyError
    with staging.fill():
        pass
    done.set()
    thread.join()


def test_what_cannot_be_uploaded_is_refused() -> None:
    """Too large, out of the block, not contiguous, inside a capture; no name, no bytes, no slots, two sizes."""
    _, ws = host()
    staging = ws.staging("ids", 16)
    with staging.fill() as slot:
        for nbytes, offset in ((17, 0), (16, 1), (1, -1)):
            with pytest.raises(SizeError, match="slot of 16"):
                slot.upload(ws.driver.empty((nbytes,), torch.uint8, 0), offset=offset)
        with pytest.raises(ArgumentError, match="contiguous"):
            slot.upload(ws.driver.empty((2, 2), torch.uint8, 0).t())
        slot.upload(ws.driver.empty((0,), torch.uint8, 0))
    with pytest.raises(LeaseReleased, match="outside"):
        slot.upload(ws.driver.empty((1,), torch.uint8, 0))
    with ws.on(ws.stream("main")), ws.capture(), staging.fill() as slot:
        with pytest.raises(CaptureError, match="replay"):
            slot.upload(ws.driver.empty((1,), torch.uint8, 0))
    assert ws.staging("ids", 16) is staging
    with pytest.raises(LayoutError, match="one size"):
        ws.staging("ids", 32)
    for name, nbytes, slots in (("", 1, 1), ("other", 0, 1), ("other", 1, 0)):
        with pytest.raises(ArgumentError):
            ws.staging(name, nbytes, slots=slots)


def test_a_closed_workspace_has_waited_for_its_copies() -> None:
    """Pinned memory goes only when nothing reads it any more."""
    device, ws = deferred()
    out = ws.driver.empty((16,), torch.uint8, 0)
    device.launch(SLOW)
    staging = ws.staging("ids", 16)
    with staging.fill() as slot:
        slot.memory[:] = b"\7" * 16
        slot.upload(out)
    ws.close()
    with pytest.raises(WorkspaceError, match="closed"), staging.fill():
        pass
    assert ws.snapshot().staging == {} and out.tolist() == [7] * 16


def test_virtual_memory_takes_uploads() -> None:
    """A device of addresses orders them and moves nothing."""
    device = Device(memory="virtual")
    ws = workspace.create("event_fenced", device=device)
    layout = Layout("large", x=spec("N", dtype=torch.float16))
    with ws.lease(layout, N=MIB) as lease, ws.staging("ids", 2 * MIB).fill() as slot:
        slot.upload(lease.x)
        device.launch("reader", reads=[lease.x])
    assert device.verdict() == "SAFE" and device.counters["upload"] == 1
