"""The log stays small however long the run, and remembers all it must."""

from __future__ import annotations

import random

import torch

from workspace.simulated import Device
from workspace.simulated.owners import KEEP, Owners, visible

MIB = 1 << 20


def hand_over(device: Device, event: int, before: int, after: int) -> None:
    device.record(event, before)
    device.wait(event, after)


def test_layers_of_changing_sizes_leave_a_log_that_does_not_grow() -> None:
    """Without host synchronisation, and with a stream that never learns anything."""
    device = Device(memory="virtual")
    main, side, idle = device.new_stream(), device.new_stream(), device.new_stream()
    slab, event, rnd = device.alloc(64 * MIB), device.new_event(), random.Random(0)
    sizes = []
    for step in range(3000):
        at = slab.address
        for _ in range(6):
            nbytes = rnd.randrange(1, 64) * 256 * rnd.randrange(1, 64)
            device.launch("write", writes=[(at, nbytes)], stream=main)
            hand_over(device, event, main, side)
            device.launch("read", reads=[(at, nbytes)], stream=side)
            at += nbytes
        hand_over(device, event, side, main)
        if step % 300 == 299:
            sizes.append(len(device.judge.log))
    assert device.verdict() == "SAFE"
    assert max(sizes[5:]) <= max(sizes[:5]) + 16 and max(sizes) < 200
    device.launch("never ordered", reads=[slab], stream=idle)
    assert device.verdict() == "UNSAFE"


def test_compaction_keeps_what_a_stream_may_still_race_with() -> None:
    device = Device(memory="virtual")
    main, side = device.new_stream(), device.new_stream()
    x = device.alloc(64 * MIB)
    for index in range(20_000):
        device.launch("write", writes=[(x.address + 512 * index, 8)], stream=main)
    assert len(device.judge.log) == 20_000
    device.launch("read", reads=[(x.address + 512 * 7, 8)], stream=side)
    assert len(device.races()) == 1


def test_host_synchronisation_empties_the_log() -> None:
    device = Device(memory="virtual")
    x = device.alloc(64 * MIB)
    for index in range(5000):
        device.launch("write", writes=[(x.address + 512 * index, 8)], stream=0)
        if index % 100 == 99:
            device.synchronize()
    assert len(device.judge.log) <= 2048 + 100


def test_destroyed_streams_leave_no_trace_in_the_clocks() -> None:
    device = Device(memory="virtual")
    slab, event = device.alloc(4096), device.new_event()
    for index in range(2000):
        handle = device.new_raw_stream()
        key = device.stream_id(handle)
        device.launch("raw", writes=[(slab.address + index, 1)], stream=key)
        hand_over(device, event, key, 0)
        device.destroy_stream(handle)
        device.synchronize()
    assert len(device.streams[0].clock) < 600 and len(device.host.clock) < 600
    assert device.verdict() == "SAFE"


def test_history_of_freed_memory_ends_when_the_segment_goes_back() -> None:
    device = Device(memory="virtual")
    main = device.new_stream()
    for _ in range(50):
        buffer = device.alloc(32 * MIB, main)
        device.launch("write", writes=[buffer], stream=main)
        del buffer
        device.empty_cache()
    assert len(device.judge.log) == 0


def test_labels_that_are_covered_by_later_ones_go_first() -> None:
    labels = [(1, 0, 10, "old"), (2, 0, 5, "left"), (3, 5, 10, "right"), (4, 20, 30, "weights")]
    assert visible(labels) == labels[1:]
    assert visible([(1, 0, 10, "a"), (2, 0, 5, "b")]) == [(1, 0, 10, "a"), (2, 0, 5, "b")]


def test_owners_are_those_of_the_time_and_weights_are_never_forgotten() -> None:
    owners = Owners()
    owners.label(1, 1 << 20, 512, "weights")
    for tick in range(2, 4 * KEEP):
        owners.label(tick, 0, 512, f"layer {tick}")
    assert len(owners) <= 2 * KEEP
    assert owners.at(4 * KEEP, 1 << 20, (1 << 20) + 1) == "weights"
    assert owners.at(4 * KEEP - 5, 0, 1) == f"layer {4 * KEEP - 5}"
    assert owners.at(4 * KEEP, 4096, 4097) == ""


def test_without_a_log_nothing_is_kept() -> None:
    device = Device(memory="virtual", log=False)
    x = device.empty((512,), torch.uint8)
    node = device.launch("op", writes=[x])
    assert device.launch("op", writes=[x]) is node and node.done
    assert device.judge is None and device.races() == []
