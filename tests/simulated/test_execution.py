"""Deferred execution: every legal order may happen, and no other."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from workspace.errors import DriverError, StreamError
from workspace.simulated import Device, Directed, InOrder, Random, StreamFirst


def deferred(schedule: object = None) -> tuple[Device, int, int]:
    device = Device(execution="deferred", schedule=schedule)
    return device, device.new_stream("main"), device.new_stream("side")


def enqueue(device: Device, ran: list, label: str, stream: int) -> None:
    device.launch(label, fn=lambda: ran.append(label), stream=stream)


def test_immediate_execution_runs_at_the_launch() -> None:
    device, ran = Device(), []
    enqueue(device, ran, "op", 0)
    assert ran == ["op"]


def test_nothing_runs_before_somebody_waits() -> None:
    device, main, _ = deferred(InOrder())
    ran: list[str] = []
    enqueue(device, ran, "op", main)
    assert ran == [] and len(device.queue) == 1
    device.synchronize(main)
    assert ran == ["op"] and len(device.queue) == 0


@pytest.mark.parametrize("seed", range(10))
def test_streams_keep_their_order_and_events_theirs(seed: int) -> None:
    device, main, side = deferred(Random(seed, eagerness=0.5))
    ran: list[str] = []
    event = device.new_event()
    for step in range(4):
        enqueue(device, ran, f"main {step}", main)
        if step == 1:
            device.record(event, main)
        enqueue(device, ran, f"side {step}", side)
        if step == 1:
            device.wait(event, side)
    device.synchronize()
    for name in ("main", "side"):
        assert [label for label in ran if label.startswith(name)] == [f"{name} {step}" for step in range(4)]
    assert ran.index("main 1") < ran.index("side 2")


def test_random_schedules_reach_every_legal_order() -> None:
    orders = set()
    for seed in range(60):
        device, main, side = deferred(Random(seed))
        ran: list[str] = []
        for label, stream in (("a", main), ("b", main), ("x", side), ("y", side)):
            enqueue(device, ran, label, stream)
        device.synchronize()
        orders.add("".join(ran))
    every = ("".join(order) for order in itertools.permutations("abxy"))
    legal = {order for order in every if order.index("a") < order.index("b") and order.index("x") < order.index("y")}
    assert orders == legal


def test_a_seed_replays_its_order() -> None:
    def order() -> list[str]:
        device, main, side = deferred(Random(7, eagerness=0.5))
        ran: list[str] = []
        for step in range(10):
            enqueue(device, ran, f"{step}", main if step % 2 else side)
        device.synchronize()
        return ran

    assert order() == order()


@pytest.mark.parametrize("schedule, expected", [
    (InOrder(), "abxcyz"), (StreamFirst(1), "abcxyz"), (StreamFirst(2), "xyzabc"),
    (StreamFirst(1, last=True), "xyzabc"),
])  # fmt: skip
def test_named_schedules(schedule: object, expected: str) -> None:
    device, main, side = deferred(schedule)
    ran: list[str] = []
    for label in "abxcyz":
        enqueue(device, ran, label, main if label in "abc" else side)
    device.synchronize()
    assert "".join(ran) == expected


@pytest.mark.parametrize("blocking", [True, False])
def test_deferred_work_on_the_default_stream_waits_for_blocking_streams(blocking: bool) -> None:
    orders = set()
    for seed in range(20):
        device, ran = Device(execution="deferred", schedule=Random(seed)), []
        other = device.stream_id(device.new_raw_stream(blocking=blocking))
        enqueue(device, ran, "a", other)
        enqueue(device, ran, "b", 0)
        enqueue(device, ran, "c", other)
        device.synchronize()
        orders.add("".join(ran))
    assert orders == ({"abc"} if blocking else {"abc", "bac", "acb"})


@pytest.mark.parametrize("blocking", [True, False])
def test_a_record_on_the_default_stream_covers_blocking_streams(blocking: bool) -> None:
    device, ran = Device(execution="deferred", schedule=StreamFirst(0)), []
    other = device.stream_id(device.new_raw_stream(blocking=blocking))
    event = device.new_event()
    enqueue(device, ran, "a", other)
    device.record(event, 0)
    device.synchronize_event(event)
    assert ran == (["a"] if blocking else [])


def racing_pair(fenced: bool, schedule: Directed) -> tuple[float, Device]:
    """A writer on one stream, a reader on another."""
    device, main, side = deferred(schedule)
    x, seen = device.empty((4,), torch.float32), []
    x.zero_()
    event = device.new_event()
    device.launch("writer", writes=[x], fn=lambda: x.fill_(1), stream=main)
    device.record(event, main)
    if fenced:
        device.wait(event, side)
    device.launch("reader", reads=[x], fn=lambda: seen.append(float(x[0])), stream=side)
    device.synchronize()
    return seen[0], device


@pytest.mark.parametrize("fenced", [False, True])
def test_a_directed_schedule_shows_the_race_unless_a_fence_forbids_it(fenced: bool) -> None:
    backwards = Directed(lambda node: node.label == "reader", lambda node: node.label == "writer")
    forwards = Directed(lambda node: node.label == "writer", lambda node: node.label == "reader")
    seen, device = racing_pair(fenced, backwards)
    assert seen == (1.0 if fenced else 0.0)
    assert device.verdict() == ("SAFE" if fenced else "UNSAFE")
    assert racing_pair(fenced, forwards)[0] == 1.0


def test_use_after_free_corrupts_as_the_block_is_handed_out_again_at_once() -> None:
    device, main, side = deferred(StreamFirst(1))
    x, seen = device.empty((256,), torch.float32, stream=main), []
    address = x.data_ptr()
    device.launch("fill", writes=[x], fn=raw_fill(device, x, 17), stream=main)
    event = device.new_event()
    device.record(event, main)
    device.wait(event, side)
    device.launch("read", reads=[x], fn=raw_read(device, x, seen), stream=side)
    del x
    y = device.empty((256,), torch.float32, stream=main)
    assert y.data_ptr() == address
    device.launch("fill", writes=[y], fn=raw_fill(device, y, 93), stream=main)
    device.synchronize()
    assert seen == [93.0]
    assert device.verdict() == "UNSAFE"


def segment_view(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    base = device.memory.segment_of(tensor.data_ptr())
    offset = tensor.data_ptr() - base
    return device.memory.segment(base)[offset : offset + 4 * tensor.numel()].view(torch.float32)


def raw_fill(device: Device, tensor: torch.Tensor, value: float) -> object:
    view = segment_view(device, tensor)
    return lambda: view.fill_(value)


def raw_read(device: Device, tensor: torch.Tensor, seen: list) -> object:
    view = segment_view(device, tensor)
    return lambda: seen.append(float(view[0]))


def test_queued_operations_keep_a_freed_segment_mapped() -> None:
    device, main, _ = deferred(InOrder())
    x, seen = device.empty((8 << 20,), torch.float32), []
    device.launch("fill", fn=raw_fill(device, x, 5), stream=main)
    read = raw_read(device, x, seen)
    del x
    device.empty_cache()  # as cudaFree does, it lets the device finish first
    assert device.memory.used == 0 and len(device.queue) == 0
    read()
    assert seen == [5.0]


def test_a_query_is_false_until_the_work_is_done_and_polling_ends() -> None:
    device, main, _ = deferred(InOrder())
    event, ran = device.new_event(), []
    for step in range(3):
        enqueue(device, ran, f"{step}", main)
    device.record(event, main)
    polls = 0
    while not device.query(event):
        polls += 1
    assert polls == 3 and len(ran) == 3


def test_polling_ends_in_immediate_execution_that_runs_ahead() -> None:
    device = Device(memory="virtual", ahead=5)
    event = device.new_event()
    device.launch("op")
    device.record(event)
    answers = [device.query(event) for _ in range(6)]
    assert answers == [False] * 5 + [True]


def test_a_memset_waits_its_turn() -> None:
    device, main, _ = deferred(InOrder())
    x = device.empty((16,), torch.uint8)
    x.fill_(1)
    device.memset(x.data_ptr(), 16, 9, main)
    assert x.tolist() == [1] * 16
    device.synchronize()
    assert x.tolist() == [9] * 16


def test_an_error_appears_at_the_next_wait_names_its_launch_and_stays() -> None:
    device, main, side = deferred(InOrder())
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("bad kernel")

    device.launch("failing", fn=fail, stream=main)
    enqueue(device, ran, "later", main)
    with pytest.raises(DriverError, match="bad kernel") as caught:
        device.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("failing" in note for note in caught.value.__cause__.__notes__)
    assert ran == []
    with pytest.raises(DriverError, match="sticky"):
        device.launch("anything", stream=side)
    with pytest.raises(DriverError, match="sticky"):
        device.synchronize(side)


def test_an_operation_cannot_wait_for_the_device_it_runs_on() -> None:
    device, main, _ = deferred(InOrder())
    device.launch("waits", fn=lambda: device.synchronize(), stream=main)
    with pytest.raises(DriverError, match="while it ran on the device"):
        device.synchronize()


def test_draining_teaches_the_host_nothing() -> None:
    device, main, side = deferred(InOrder())
    x = device.empty((4,), torch.uint8)
    device.launch("write", writes=[x], stream=main)
    device.drain()
    device.launch("read", reads=[x], stream=side)
    assert device.verdict() == "UNSAFE"


def test_a_drain_can_stop_at_a_node_a_stream_or_a_condition() -> None:
    device, main, side = deferred(InOrder())
    ran: list[str] = []
    enqueue(device, ran, "a", main)
    node = device.launch("b", fn=lambda: ran.append("b"), stream=side)
    enqueue(device, ran, "c", main)
    enqueue(device, ran, "d", side)
    device.drain(node)
    assert ran == ["a", "b"]
    device.drain(main)
    assert ran == ["a", "b", "c"]
    device.drain(lambda: "d" in ran, schedule=StreamFirst(side))
    assert ran == ["a", "b", "c", "d"]


def test_the_execution_hook_surrounds_every_node() -> None:
    device, main, _ = deferred(InOrder())
    seen: list[str] = []
    device.queue.execute = lambda node: seen.append(node.label)
    device.launch("op", fn=lambda: seen.append("not called"), stream=main)
    device.synchronize()
    assert seen == ["op"]


def test_a_finished_node_keeps_nothing_alive() -> None:
    device, main, _ = deferred(InOrder())
    node = device.launch("op", fn=lambda: None, stream=main)
    assert node.fn is not None
    device.synchronize()
    assert node.fn is None and node.done


def test_the_current_stream_is_each_threads_own() -> None:
    device = Device()
    main = device.new_stream()
    seen: list[int] = []
    with device.on(main):
        thread = threading.Thread(target=lambda: seen.append(device.current_stream()))
        thread.start()
        thread.join()
        assert device.current_stream() == main
    assert seen == [0] and device.current_stream() == 0


def test_a_destroyed_or_unknown_stream_is_refused() -> None:
    device = Device()
    handle = device.new_raw_stream()
    key = device.stream_id(handle)
    device.destroy_stream(handle)
    with pytest.raises(StreamError, match="was destroyed"):
        device.launch("op", stream=key)
    with pytest.raises(StreamError, match="is not known"):
        device.set_stream(10_000)
    with pytest.raises(StreamError, match="not the handle"):
        device.stream_id(handle)


def test_work_on_a_destroyed_stream_still_runs() -> None:
    device, ran = Device(execution="deferred", schedule=InOrder()), []
    handle = device.new_raw_stream()
    enqueue(device, ran, "op", device.stream_id(handle))
    device.destroy_stream(handle)
    device.synchronize()
    assert ran == ["op"]


def test_an_event_that_was_freed_is_refused() -> None:
    device = Device()
    event = device.new_event()
    device.free_event(event)
    for call in (device.query, device.record, device.wait, device.free_event):
        with pytest.raises(DriverError, match="does not exist"):
            call(event)


def test_every_verb_is_counted() -> None:
    device = Device(memory="virtual")
    stream, event = device.new_stream(), device.new_event()
    before = device.counters.copy()
    device.launch("op")
    device.record(event)
    device.wait(event, stream)
    device.query(event)
    device.synchronize()
    buffer = device.alloc(512)
    device.memset(buffer.address, 512, 0)
    verbs = ("launch", "record", "wait", "query", "synchronize", "alloc", "memset", "malloc")
    assert device.counters - before == dict.fromkeys(verbs, 1)


def test_many_threads_share_a_device() -> None:
    device = Device(memory="virtual")
    shared = device.empty((4096,), torch.uint8)
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            stream, event = device.new_stream(), device.new_event()
            device.set_stream(stream)
            for _ in range(300):
                mine = device.empty((512,), torch.uint8)
                device.launch("own", writes=[mine, shared[index * 256 : (index + 1) * 256]])
                device.record(event)
                device.wait(event, 0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert device.verdict() == "SAFE"
    assert device.counters["launch"] == 2400
