"""Mappings of the simulated device: addresses without memory, what they count, and what becomes of their bytes."""

from __future__ import annotations

import gc

import pytest
import torch

from workspace.errors import DeviceError, OutOfMemory
from workspace.simulated import Device
from workspace.simulated.memory import LOST

MIB = 1 << 20


def test_addresses_stay_and_contents_go() -> None:
    """Nobody else gets the addresses; the memory behind them holds other bytes when it comes back."""
    device = Device()
    mapping = device.map(MIB)
    view = device.tensor(mapping, 0, (MIB,), torch.uint8)
    view.fill_(7)
    mapping.unmap()
    assert device.memory.used == 0 and device.memory.segment_of(mapping.address) is None
    other = device.map(MIB)
    assert not mapping.address <= other.address < mapping.address + MIB
    mapping.remap()
    assert device.memory.used == 2 * MIB and device.memory.segment_of(mapping.address) == mapping.address
    assert view.unique().tolist() == [LOST]


def test_twice_is_no_error() -> None:
    """A mapping without memory has none to give, one with memory needs none."""
    device = Device(memory="virtual")
    mapping = device.map(MIB)
    mapping.remap()
    assert device.memory.used == MIB
    mapping.unmap()
    mapping.unmap()
    assert device.memory.used == 0


@pytest.mark.parametrize("mapped", [True, False])
def test_one_that_is_gone_is_reclaimed_with_its_last_view(mapped: bool) -> None:
    """At the next map, trim or reclaim, mapped or not."""
    device = Device()
    mapping = device.map(MIB)
    address = mapping.address
    view = device.tensor(mapping, 0, (MIB,), torch.uint8)
    if not mapped:
        mapping.unmap()
    del mapping
    gc.collect()
    device.reclaim()
    assert device.memory.used == (MIB if mapped else 0)
    del view
    gc.collect()
    device.empty_cache()
    assert device.memory.used == 0
    with pytest.raises(DeviceError):
        device.memory.free(address)


def test_the_allocators_cache_goes_first() -> None:
    """A full device gives up what the allocator caches, then refuses, and nothing has changed."""
    device = Device(memory="virtual", capacity=32 * MIB)
    mapping = device.map(20 * MIB)
    mapping.unmap()
    held = device.empty((20 * MIB,), torch.uint8)
    with pytest.raises(OutOfMemory):
        mapping.remap()
    assert not mapping.mapped and device.memory.used == 20 * MIB
    with pytest.raises(OutOfMemory):
        device.map(20 * MIB)
    del held
    mapping.remap()
    assert device.memory.used == 20 * MIB and device.statistics.reserved == 0


def test_work_in_the_queue_runs_before_memory_goes() -> None:
    """The device is idle when its memory is taken, and bytes that come anew race with nobody."""
    device = Device(execution="deferred")
    mapping = device.map(MIB)
    first, second = device.new_stream("first"), device.new_stream("second")
    device.memset(mapping.address, MIB, 5, first)
    ran: list[int] = []
    device.launch("read", reads=[(mapping.address, MIB)], fn=lambda: ran.append(1), stream=first)
    mapping.unmap()
    assert ran == [1]
    mapping.remap()
    device.memset(mapping.address, MIB, 6, second)
    assert device.verdict() == "SAFE"
    with pytest.raises(DeviceError):
        device.memset(mapping.address + MIB, 1, 6, second)


def test_an_upload_reads_the_host_when_it_runs() -> None:
    """Bytes filled anew before the copy has run are what it brings: why slots are waited for."""
    device = Device(execution="deferred")
    host = device.driver().pinned(16)
    out = device.empty((16,), torch.uint8)
    host.fill_(1)
    device.driver().upload(host, 0, out, device.current_stream())
    host.fill_(2)
    device.synchronize()
    assert out.tolist() == [2] * 16 and device.counters["upload"] == 1
