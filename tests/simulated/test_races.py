"""What the judge reports and what it does not: each race beside its ordered control.

The cases of `torch.cuda._sanitizer` that it misses, or reports wrongly, carry their number in the checker's table.
"""

from __future__ import annotations

import pytest
import torch

from workspace.simulated import Device, Race

KIB = 1024


@pytest.fixture
def device() -> Device:
    return Device(memory="virtual")


@pytest.fixture
def streams(device: Device) -> tuple[int, int, int]:
    return device.new_stream("main"), device.new_stream("side"), device.new_stream("third")


def hand_over(device: Device, before: int, after: int) -> None:
    event = device.new_event()
    device.record(event, before)
    device.wait(event, after)


def labels(device: Device) -> set[tuple[str, str]]:
    return {(race.first.label, race.second.label) for race in device.races()}


@pytest.mark.parametrize("joined", [False, True])
def test_write_then_read_on_another_stream_needs_an_edge(device: Device, streams: tuple, joined: bool) -> None:
    main, side, _ = streams
    x = device.empty((KIB,), torch.uint8)
    device.launch("write", writes=[x], stream=main)
    if joined:
        hand_over(device, main, side)
    device.launch("read", reads=[x], stream=side)
    assert device.verdict() == ("SAFE" if joined else "UNSAFE")
    assert labels(device) == (set() if joined else {("write", "read")})


@pytest.mark.parametrize("first, second, races", [("r", "r", 0), ("r", "w", 1), ("w", "r", 1), ("w", "w", 1)])
def test_two_reads_do_not_conflict(device: Device, streams: tuple, first: str, second: str, races: int) -> None:
    x = device.empty((KIB,), torch.uint8)
    for stream, kind in zip(streams, (first, second), strict=False):
        device.launch(kind, **{"reads" if kind == "r" else "writes": [x]}, stream=stream)
    assert len(device.races()) == races


def test_order_is_transitive(device: Device, streams: tuple) -> None:
    main, side, third = streams
    x = device.empty((KIB,), torch.uint8)
    device.launch("write", writes=[x], stream=main)
    hand_over(device, main, side)
    hand_over(device, side, third)  # side enqueued nothing in between
    device.launch("read", reads=[x], stream=third)
    assert device.verdict() == "SAFE"


def test_a_record_after_a_wait_says_more_than_one_before_it(device: Device, streams: tuple) -> None:
    main, side, third = streams
    x = device.empty((KIB,), torch.uint8)
    device.launch("write", writes=[x], stream=main)
    device.launch("other", stream=side)
    hand_over(device, side, third)
    hand_over(device, main, side)
    hand_over(device, side, third)  # side enqueued nothing since the first record, but it waited
    device.launch("read", reads=[x], stream=third)
    assert device.verdict() == "SAFE"


def test_work_enqueued_after_the_record_is_not_covered(device: Device, streams: tuple) -> None:
    main, side, _ = streams
    x = device.empty((KIB,), torch.uint8)
    hand_over(device, main, side)
    device.launch("write", writes=[x], stream=main)
    device.launch("read", reads=[x], stream=side)
    assert labels(device) == {("write", "read")}


def test_every_pair_is_reported_not_the_last_one_only(device: Device, streams: tuple) -> None:
    main, side, third = streams
    x = device.empty((KIB,), torch.uint8)
    device.launch("first", writes=[x], stream=main)
    hand_over(device, main, side)
    device.launch("second", writes=[x], stream=side)
    device.launch("third", writes=[x], stream=third)
    assert labels(device) == {("first", "third"), ("second", "third")}


def test_the_report_names_both_accesses_and_the_missing_edge() -> None:
    device = Device(memory="virtual", sites=True)
    main, side = device.new_stream("main"), device.new_stream("side")
    x = device.empty((4 * KIB,), torch.uint8)
    device.label_range(x.address, 4 * KIB, "indexer")
    for step in range(3):
        device.launch(f"step {step}", reads=[x], stream=main)
    event = device.new_event()
    device.record(event, main)
    device.launch("late read", reads=[(x.address, KIB)], stream=main)
    device.wait(event, side)
    device.label_range(x.address + KIB // 2, KIB, "compressor")
    device.launch("overwrite", writes=[(x.address + KIB // 2, KIB)], stream=side)
    (race,) = device.races()
    assert (race.first.label, race.first.stream_name, race.first.position, race.first.write) == (
        "late read",
        "main",
        4,
        False,
    )
    assert (race.first.address, race.first.nbytes, race.first.owner) == (x.address, KIB, "indexer")
    assert (race.second.label, race.second.write, race.second.owner) == ("overwrite", True, "compressor")
    assert (race.address, race.nbytes) == (x.address + KIB // 2, KIB // 2)
    assert race.missing == f"stream {side} knows stream {main} up to 3, needs 4"
    assert all(__file__ in access.site[0] for access in (race.first, race.second))
    text = str(race)
    for part in ("late read", "overwrite", "indexer", "compressor", "needs 4", "test_the_report_names"):
        assert part in text


def test_the_same_pair_is_counted_once_per_occurrence(device: Device, streams: tuple) -> None:
    x = device.empty((KIB,), torch.uint8)
    for _ in range(5):
        device.launch("write", writes=[x], stream=streams[0])
        device.launch("read", reads=[x], stream=streams[1])
    kinds = {(race.first.label, race.second.label): race.count for race in device.races()}
    assert kinds == {("write", "read"): 5, ("read", "write"): 4}


def test_an_endless_race_stays_cheap_to_log_and_is_counted(device: Device, streams: tuple) -> None:
    main, side, _ = streams
    x = device.alloc(1 << 20)
    for step in range(20_000):
        device.launch("write", writes=[(x.address + step % 700, 300)], stream=main if step % 2 else side)
    assert device.verdict() == "UNSAFE"
    assert len(device.races()) == 2 * 16 and sum(race.count for race in device.races()) > 10_000
    device.launch("write", writes=[x], stream=main)
    assert len(device.judge.log) == 1


# -- the eight cases torch.cuda._sanitizer was measured on -------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True])
def test_csan_1_reuse_after_free_without_record_stream_is_a_race(recorded: bool) -> None:
    device = Device(memory="virtual", ahead=1 << 60)
    main, side = device.new_stream("main"), device.new_stream("side")
    x = device.empty((KIB,), torch.uint8, stream=main)
    address = x.address
    device.launch("fill", writes=[x], stream=main)
    hand_over(device, main, side)
    device.launch("side read", reads=[x], stream=side)
    if recorded:
        device.record_stream(x, side)
    del x
    y = device.empty((KIB,), torch.uint8, stream=main)
    assert (y.address == address) is not recorded
    device.launch("next owner", writes=[y], stream=main)
    assert labels(device) == (set() if recorded else {("side read", "next owner")})


@pytest.mark.parametrize("start, races", [(KIB // 2, 1), (KIB, 0)])
def test_csan_2_overlapping_views_with_different_starts_race_and_adjacent_ones_do_not(
    device: Device, streams: tuple, start: int, races: int
) -> None:
    x = device.empty((4 * KIB,), torch.uint8)
    device.launch("left", writes=[x[:KIB]], stream=streams[0])
    device.launch("right", writes=[x[start : start + KIB]], stream=streams[1])
    assert len(device.races()) == races


@pytest.mark.parametrize("complete", [True, False])
def test_csan_3_reuse_after_a_query_that_returned_true_is_safe(complete: bool) -> None:
    device = Device(memory="virtual", ahead=0 if complete else 1 << 60)
    main, side = device.new_stream(), device.new_stream()
    x = device.empty((KIB,), torch.uint8)
    event = device.new_event()
    device.launch("read", reads=[x], stream=side)
    device.record(event, side)
    assert device.query(event) is complete
    device.launch("reuse", writes=[x], stream=main)
    assert device.verdict() == ("SAFE" if complete else "UNSAFE")


@pytest.mark.parametrize("how", ["event", "stream", "device", "nothing"])
def test_csan_4_reuse_after_host_synchronisation_is_safe(device: Device, streams: tuple, how: str) -> None:
    main, side, _ = streams
    x = device.empty((KIB,), torch.uint8)
    event = device.new_event()
    device.launch("read", reads=[x], stream=side)
    device.record(event, side)
    if how == "event":
        device.synchronize_event(event)
    elif how != "nothing":
        device.synchronize(side if how == "stream" else None)
    device.launch("reuse", writes=[x], stream=main)
    assert device.verdict() == ("UNSAFE" if how == "nothing" else "SAFE")


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("default_first", [True, False])
def test_csan_5_the_default_stream_orders_blocking_streams_only(
    device: Device, blocking: bool, default_first: bool
) -> None:
    other = device.stream_id(device.new_raw_stream(blocking=blocking))
    x = device.empty((KIB,), torch.uint8)
    pair = (0, other) if default_first else (other, 0)
    device.launch("write", writes=[x], stream=pair[0])
    device.launch("read", reads=[x], stream=pair[1])
    assert device.verdict() == ("SAFE" if blocking else "UNSAFE")


@pytest.mark.parametrize("rerecorded", [True, False])
def test_csan_6_a_wait_follows_the_last_record_only(device: Device, streams: tuple, rerecorded: bool) -> None:
    main, side, third = streams
    x = device.empty((KIB,), torch.uint8)
    event = device.new_event()
    device.launch("write", writes=[x], stream=main)
    device.record(event, main)
    if rerecorded:
        device.record(event, third)
    device.wait(event, side)
    device.launch("read", reads=[x], stream=side)
    assert device.verdict() == ("UNSAFE" if rerecorded else "SAFE")


@pytest.mark.parametrize("fenced", [False, True])
def test_csan_7_an_arena_overwritten_as_a_whole_races_with_each_view_still_read(
    device: Device, streams: tuple, fenced: bool
) -> None:
    """vllm#49236: the compressor's slab is the indexer's, read on a side stream, overwritten on the main one."""
    main, side, _ = streams
    arena = device.empty((64 * KIB,), torch.uint8)
    views = [arena[start * KIB : (start + 4) * KIB] for start in (0, 16, 40)]
    for number, view in enumerate(views):
        device.launch(f"view {number}", reads=[view], stream=side)
    if fenced:
        hand_over(device, side, main)
    device.launch("compressor", writes=[arena], stream=main)
    assert labels(device) == (set() if fenced else {(f"view {number}", "compressor") for number in range(3)})


@pytest.mark.parametrize("fence_last", [False, True])
def test_csan_8_a_fence_recorded_before_the_last_reader_of_an_interior_view_is_too_early(
    device: Device, streams: tuple, fence_last: bool
) -> None:
    main, side, _ = streams
    arena = device.empty((64 * KIB,), torch.uint8)
    event = device.new_event()
    device.launch("early read", reads=[arena[: 4 * KIB]], stream=side)
    if not fence_last:
        device.record(event, side)
    device.launch("late read", reads=[arena[16 * KIB : 20 * KIB]], stream=side)
    if fence_last:
        device.record(event, side)
    device.wait(event, main)
    device.launch("compressor", writes=[arena], stream=main)
    assert labels(device) == (set() if fence_last else {("late read", "compressor")})


# -- streams and identity ----------------------------------------------------------------------------------


def test_a_raw_stream_with_a_reused_handle_is_another_stream(device: Device) -> None:
    """rapidsai/rmm#649: the handle is the same, the order is not."""
    x = device.empty((KIB,), torch.uint8)
    first = device.new_raw_stream()
    key = device.stream_id(first)
    device.launch("read", reads=[x], stream=key)
    device.destroy_stream(first)
    second = device.new_raw_stream()
    assert second == first and device.stream_id(second) != key
    device.launch("write", writes=[x], stream=device.stream_id(second))
    assert labels(device) == {("read", "write")}


def test_a_new_stream_comes_after_what_the_host_saw_and_nothing_else(device: Device, streams: tuple) -> None:
    seen, unseen = device.empty((KIB,), torch.uint8), device.empty((KIB,), torch.uint8)
    device.launch("seen", writes=[seen], stream=streams[0])
    device.synchronize(streams[0])
    device.launch("unseen", writes=[unseen], stream=streams[0])
    fresh = device.new_stream()
    device.launch("fresh", reads=[seen, unseen], stream=fresh)
    assert labels(device) == {("unseen", "fresh")}


@pytest.mark.parametrize("synchronised", [True, False])
def test_device_synchronisation_covers_streams_that_are_gone(device: Device, synchronised: bool) -> None:
    x = device.empty((KIB,), torch.uint8)
    handle = device.new_raw_stream()
    device.launch("read", reads=[x], stream=device.stream_id(handle))
    device.destroy_stream(handle)
    if synchronised:
        device.synchronize()
    device.launch("write", writes=[x], stream=device.new_stream())
    assert device.verdict() == ("SAFE" if synchronised else "UNSAFE")


# -- verdicts ----------------------------------------------------------------------------------------------


def test_without_a_log_the_verdict_is_unknown() -> None:
    device = Device(memory="virtual", log=False)
    device.launch("a")
    assert device.verdict() == "UNKNOWN" and device.reasons() == ["the device keeps no log"]


def test_something_not_modelled_makes_a_safe_run_unknown_and_leaves_an_unsafe_one(device: Device) -> None:
    x = device.empty((KIB,), torch.uint8)
    device.launch("a", writes=[x], stream=device.new_stream())
    assert device.verdict() == "SAFE" and device.reasons() == []
    device.unknown("an opaque kernel")
    assert device.verdict() == "UNKNOWN" and device.reasons() == ["an opaque kernel"]
    device.launch("b", writes=[x], stream=device.new_stream())
    assert device.verdict() == "UNSAFE"
    assert isinstance(device.races()[0], Race)
