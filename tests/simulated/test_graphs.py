"""Replays: order to the outside, races inside, and what a graph holds until it is released."""

from __future__ import annotations

import gc

import pytest
import torch

from workspace.errors import GraphError
from workspace.simulated import Device, InOrder, Random, SimulatedGraph, StreamFirst

KIB = 1024


@pytest.fixture
def device() -> Device:
    return Device(memory="virtual")


def hand_over(device: Device, before: int, after: int) -> None:
    event = device.new_event()
    device.record(event, before)
    device.wait(event, after)


def captured(device: Device, stream: int, reads: list = (), writes: list = (), label: str = "node") -> SimulatedGraph:
    device.begin_capture(stream)
    device.launch(label, reads, writes, stream=stream)
    return device.end_capture(stream)


def labels(device: Device) -> set[tuple[str, str]]:
    return {(race.first.label, race.second.label) for race in device.races()}


@pytest.mark.parametrize("joined", [True, False])
def test_a_fork_inside_a_graph_races_at_each_replay_and_not_before(device: Device, joined: bool) -> None:
    main, side, x = device.new_stream(), device.new_stream(), device.empty((KIB,), torch.uint8)
    device.begin_capture(main)
    hand_over(device, main, side)
    device.launch("write", writes=[x], stream=main)
    if joined:
        hand_over(device, main, side)
    device.launch("read", reads=[x], stream=side)
    hand_over(device, side, main)
    graph = device.end_capture(main)
    assert device.verdict() == "SAFE"
    graph.launch(main)
    graph.launch(main)
    assert device.verdict() == ("SAFE" if joined else "UNSAFE")
    if not joined:
        (race,) = device.races()
        assert (race.count, race.first.graph, race.second.graph) == (2, graph.name, graph.name)
        assert race.missing == f"inside {graph.name}, stream {side} knows stream {main} up to 0, needs 1"


@pytest.mark.parametrize("fenced", [True, False])
def test_a_replay_beside_eager_work_on_its_bytes(device: Device, fenced: bool) -> None:
    """vllm#42177: the decode graph replays while an eager prefill uses the same buffer on another stream."""
    decode, prefill, x = device.new_stream(), device.new_stream(), device.empty((8 * KIB,), torch.uint8)
    graph = captured(device, decode, writes=[x[: 4 * KIB]], label="decode")
    device.launch("prefill", writes=[x[2 * KIB :]], stream=prefill)
    if fenced:
        hand_over(device, prefill, decode)
    graph.launch(decode)
    if fenced:
        hand_over(device, decode, prefill)
    device.launch("next prefill", reads=[x[2 * KIB :]], stream=prefill)
    expected = set() if fenced else {("prefill", "decode"), ("decode", "next prefill")}
    assert labels(device) == expected
    for race in device.races():
        assert (race.address, race.nbytes) == (x.address + 2 * KIB, 2 * KIB)
        assert {race.first.graph, race.second.graph} == {"", graph.name}


@pytest.mark.parametrize("same_pool", [True, False])
def test_two_graphs_replayed_on_two_streams_race_if_they_share_bytes(device: Device, same_pool: bool) -> None:
    streams = device.new_stream(), device.new_stream()
    x, y = device.empty((KIB,), torch.uint8), device.empty((KIB,), torch.uint8)
    graphs = [captured(device, stream, writes=[x if same_pool or stream == streams[0] else y]) for stream in streams]
    for graph, stream in zip(graphs, streams, strict=True):
        graph.launch(stream)
    assert device.verdict() == ("UNSAFE" if same_pool else "SAFE")


def test_launches_of_one_graph_follow_each_other_on_whatever_streams(device: Device) -> None:
    """``cudaGraphLaunch``: each launch is ordered behind previous launches of the same executable graph."""
    first, second, x = device.new_stream(), device.new_stream(), device.empty((KIB,), torch.uint8)
    graph = captured(device, first, writes=[x])
    graph.launch(first)
    graph.launch(second)
    assert device.verdict() == "SAFE"


def test_edges_captured_on_a_stream_order_nothing_eager(device: Device) -> None:
    main, side, x = device.new_stream(), device.new_stream(), device.empty((KIB,), torch.uint8)
    device.launch("eager write", writes=[x], stream=side)
    device.begin_capture(main)
    hand_over(device, main, side)
    device.launch("captured", stream=side)
    hand_over(device, side, main)  # not an edge from what side did before
    device.end_capture(main)
    device.launch("eager read", reads=[x], stream=main)
    assert labels(device) == {("eager write", "eager read")}


def test_only_bytes_that_are_written_conflict_with_reads(device: Device) -> None:
    main, side, x = device.new_stream(), device.new_stream(), device.empty((KIB,), torch.uint8)
    graph = captured(device, main, reads=[x[:512]], writes=[x[512:]])
    assert graph.reads == ((x.address, 512),) and graph.writes == ((x.address + 512, 512),)
    graph.launch(main)
    device.launch("read", reads=[x[:512]], stream=side)
    assert device.verdict() == "SAFE"
    device.launch("read more", reads=[x], stream=side)
    assert device.verdict() == "UNSAFE"


def test_a_graph_launched_in_a_capture_becomes_its_child() -> None:
    device = Device()
    stream, ran = device.new_stream(), []
    device.begin_capture(stream)
    device.launch("inner", fn=lambda: ran.append("inner"), stream=stream)
    child = device.end_capture(stream)
    device.begin_capture(stream)
    child.launch(stream)
    device.launch("outer", fn=lambda: ran.append("outer"), stream=stream)
    parent = device.end_capture(stream)
    assert ran == []
    parent.launch(stream)
    assert ran == ["inner", "outer"]


@pytest.mark.parametrize("joined", [True, False])
def test_races_inside_a_child_graph_are_those_of_its_parent(device: Device, joined: bool) -> None:
    main, side, x = device.new_stream(), device.new_stream(), device.empty((KIB,), torch.uint8)
    device.begin_capture(main)
    hand_over(device, main, side)
    device.launch("write", writes=[x], stream=main)
    if joined:
        hand_over(device, main, side)
    device.launch("read", reads=[x], stream=side)
    hand_over(device, side, main)
    child = device.end_capture(main)
    device.begin_capture(main)
    child.launch(main)
    parent = device.end_capture(main)
    assert device.verdict() == "SAFE"
    parent.launch(main)
    assert labels(device) == (set() if joined else {("write", "read")})


@pytest.mark.parametrize("one_graph", [True, False])
def test_deferred_launches_of_one_graph_do_not_overlap(one_graph: bool) -> None:
    """On two streams, nothing else would keep the second from passing the first."""
    orders = set()
    for seed in range(20):
        device = Device(execution="deferred", schedule=Random(seed))
        streams, ran = (device.new_stream(), device.new_stream()), []
        graphs = []
        for _ in range(2):
            device.begin_capture(streams[0])
            for label in "ab":
                device.launch(label, fn=lambda label=label, ran=ran: ran.append(label), stream=streams[0])
            graphs.append(device.end_capture(streams[0]))
        for index, stream in enumerate(streams):
            graphs[0 if one_graph else index].launch(stream)
        device.synchronize()
        orders.add("".join(ran))
    assert orders == ({"abab"} if one_graph else {"abab", "aabb"})


def test_release_is_told_once_at_reset(device: Device) -> None:
    stream, told = device.new_stream(), []
    graph = captured(device, stream)
    graph.on_release(lambda: told.append(1))
    assert not graph.released
    graph.reset()
    graph.reset()
    assert told == [1] and graph.released
    with pytest.raises(GraphError, match="after"):
        graph.launch(stream)
    with pytest.raises(GraphError, match="already released"):
        graph.on_release(lambda: None)


def test_release_is_told_when_the_graph_is_collected(device: Device) -> None:
    told: list[int] = []
    graph = captured(device, device.new_stream())
    graph.on_release(lambda: told.append(1))
    del graph
    gc.collect()
    assert told == [1]


def test_release_waits_for_the_last_launch() -> None:
    device = Device(execution="deferred", schedule=InOrder())
    stream, told, ran = device.new_stream(), [], []
    device.begin_capture(stream)
    device.launch("op", fn=lambda: ran.append(1), stream=stream)
    graph = device.end_capture(stream)
    graph.on_release(lambda: told.append(list(ran)))
    graph.launch(stream)
    graph.reset()
    assert told == []
    device.synchronize()
    assert told == [[1]]


@pytest.mark.parametrize("schedule", [InOrder(), Random(3), StreamFirst(1), StreamFirst(2, last=True)])
def test_deferred_replays_keep_every_captured_edge(schedule: object) -> None:
    device = Device(execution="deferred", schedule=schedule)
    main, side, ran = device.new_stream(), device.new_stream(), []
    fork, join = device.new_event(), device.new_event()
    device.begin_capture(main)
    device.launch("a", fn=lambda: ran.append("a"), stream=main)
    device.record(fork, main)
    device.wait(fork, side)
    device.launch("b", fn=lambda: ran.append("b"), stream=side)
    device.launch("c", fn=lambda: ran.append("c"), stream=main)
    device.record(join, side)
    device.wait(join, main)
    device.launch("d", fn=lambda: ran.append("d"), stream=main)
    graph = device.end_capture(main)
    device.launch("before", fn=lambda: ran.append("before"), stream=main)
    for _ in range(2):
        graph.launch(main)
    device.launch("after", fn=lambda: ran.append("after"), stream=main)
    device.synchronize()
    assert ran[0] == "before" and ran[-1] == "after"
    for replay in (ran[1:5], ran[5:9]):
        assert replay[0] == "a" and replay[3] == "d" and set(replay[1:3]) == {"b", "c"}


def test_a_deferred_branch_really_runs_beside_the_other() -> None:
    """The control of the test above: without the join, some schedule lets d pass b."""
    orders = set()
    for seed in range(20):
        device = Device(execution="deferred", schedule=Random(seed))
        main, side, ran = device.new_stream(), device.new_stream(), []
        device.begin_capture(main)
        hand_over(device, main, side)
        device.launch("b", fn=lambda ran=ran: ran.append("b"), stream=side)
        device.launch("c", fn=lambda ran=ran: ran.append("c"), stream=main)
        hand_over(device, side, main)
        device.end_capture(main).launch(main)
        device.synchronize()
        orders.add(tuple(ran))
    assert orders == {("b", "c"), ("c", "b")}


def test_a_replay_costs_one_logged_operation_whatever_its_size(device: Device) -> None:
    stream, x = device.new_stream(), device.empty((64 * KIB,), torch.uint8)
    device.begin_capture(stream)
    for index in range(64):
        device.launch(f"layer {index}", writes=[x[index * KIB : (index + 1) * KIB]], stream=stream)
    graph = device.end_capture(stream)
    assert graph.writes == ((x.address, 64 * KIB),)
    graph.launch(stream)
    assert len(device.judge.log) == 1
