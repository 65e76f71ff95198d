"""What CUDA refuses during a capture is refused, one by one, and the capture is invalid afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from workspace.errors import CaptureBroken, CaptureError, StreamError
from workspace.simulated import Device


@pytest.fixture
def device() -> Device:
    return Device()


def broken(device: Device, stream: int) -> None:
    """The capture on the stream is invalid: nothing more is captured, and its end says why and frees the stream."""
    with pytest.raises(CaptureBroken, match="invalid"):
        device.launch("after", stream=stream)
    with pytest.raises(CaptureBroken, match="is invalid"):
        device.end_capture(stream)
    assert device.capture_of(stream) == 0
    device.launch("eager again", stream=stream)


def in_thread(call: Callable[[], object]) -> BaseException | None:
    caught: list[BaseException | None] = [None]

    def run() -> None:
        try:
            call()
        except BaseException as error:
            caught[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0]


def test_captured_work_does_not_run_until_the_replay(device: Device) -> None:
    stream, ran = device.new_stream(), []
    device.begin_capture(stream)
    device.launch("op", fn=lambda: ran.append(1), stream=stream)
    graph = device.end_capture(stream)
    assert ran == []
    graph.launch(stream)
    graph.launch(stream)
    assert ran == [1, 1]


def test_a_stream_that_waits_for_a_captured_event_is_captured(device: Device) -> None:
    main, side = device.new_stream(), device.new_stream()
    event = device.new_event()
    capture = device.begin_capture(main)
    device.record(event, main)
    assert device.capture_of(side) == 0
    device.wait(event, side)
    assert device.capture_of(side) == capture
    device.launch("forked", stream=side)
    device.record(event, side)
    device.wait(event, main)
    graph = device.end_capture(main)
    assert [node.label for node in graph.nodes] == ["forked"]
    assert device.capture_of(side) == 0


def test_edges_are_those_of_streams_and_events(device: Device) -> None:
    main, side = device.new_stream(), device.new_stream()
    fork, join = device.new_event(), device.new_event()
    device.begin_capture(main)
    device.launch("a", stream=main)
    device.record(fork, main)
    device.wait(fork, side)
    device.launch("b", stream=side)
    device.launch("c", stream=main)
    device.record(join, side)
    device.wait(join, main)
    device.launch("d", stream=main)
    graph = device.end_capture(main)
    assert {(a.label, b.label) for a, b in graph.edges} == {("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")}


def test_query_of_a_captured_event_breaks_the_capture(device: Device) -> None:
    stream, event = device.new_stream(), device.new_event()
    device.begin_capture(stream)
    device.record(event, stream)
    with pytest.raises(CaptureBroken, match="cudaErrorCapturedEvent"):
        device.query(event)
    broken(device, stream)


def test_synchronisation_of_a_captured_event_breaks_the_capture(device: Device) -> None:
    stream, event = device.new_stream(), device.new_event()
    device.begin_capture(stream)
    device.record(event, stream)
    with pytest.raises(CaptureBroken, match="cudaErrorCapturedEvent"):
        device.synchronize_event(event)
    broken(device, stream)


@pytest.mark.parametrize("verb", ["synchronize", "query_stream"])
def test_a_capturing_stream_has_no_status(device: Device, verb: str) -> None:
    stream = device.new_stream()
    device.begin_capture(stream, mode="relaxed")
    with pytest.raises(CaptureBroken, match="StreamCaptureUnsupported"):
        getattr(device, verb)(stream)
    broken(device, stream)


def test_device_synchronisation_breaks_every_capture(device: Device) -> None:
    first, second = device.new_stream(), device.new_stream()
    device.begin_capture(first, mode="relaxed")
    device.begin_capture(second, mode="relaxed")
    with device.relaxed(), pytest.raises(CaptureBroken, match="device synchronisation"):
        device.synchronize()
    broken(device, first)
    broken(device, second)


def test_an_event_recorded_before_the_capture_orders_nothing_inside_it(device: Device) -> None:
    """pytorch#155658: the wait is refused, as it would cross the capture's boundary."""
    main, other, event = device.new_stream(), device.new_stream(), device.new_event()
    device.record(event, other)
    device.begin_capture(main)
    with pytest.raises(CaptureBroken, match="Isolation"):
        device.wait(event, main)
    broken(device, main)


def test_an_event_never_recorded_is_no_obstacle(device: Device) -> None:
    main, event = device.new_stream(), device.new_event()
    device.begin_capture(main)
    device.wait(event, main)
    device.end_capture(main)


def test_no_wait_is_captured_once_the_capture_is_broken(device: Device) -> None:
    main, event, never = device.new_stream(), device.new_event(), device.new_event()
    device.begin_capture(main)
    device.record(event, main)
    with pytest.raises(CaptureBroken):
        device.query(event)
    for call in (lambda: device.wait(never, main), lambda: device.record(never, main), lambda: device.alloc(8, main)):
        with pytest.raises(CaptureBroken, match="Invalidated"):
            call()
    broken(device, main)


def test_an_event_of_a_capture_that_is_over_cannot_be_waited_for(device: Device) -> None:
    main, eager, event = device.new_stream(), device.new_stream(), device.new_event()
    device.begin_capture(main)
    device.record(event, main)
    device.end_capture(main)
    with pytest.raises(CaptureError, match="which is over"):
        device.wait(event, eager)
    with pytest.raises(CaptureError, match="cudaErrorCapturedEvent"):
        device.query(event)
    device.record(event, main)  # recorded again outside, it is an ordinary event
    device.wait(event, eager)
    assert device.query(event)


def test_two_captures_cannot_be_joined(device: Device) -> None:
    first, second, event = device.new_stream(), device.new_stream(), device.new_event()
    device.begin_capture(first)
    device.begin_capture(second)
    device.record(event, first)
    with pytest.raises(CaptureBroken, match="Merge"):
        device.wait(event, second)
    broken(device, first)
    broken(device, second)


def test_an_unjoined_branch_makes_the_capture_invalid(device: Device) -> None:
    main, side, event = device.new_stream("main"), device.new_stream("side"), device.new_event()
    device.begin_capture(main)
    device.record(event, main)
    device.wait(event, side)
    device.launch("forked", stream=side)
    with pytest.raises(CaptureBroken, match=r"stream \d+ \(side\) was not joined"):
        device.end_capture(main)
    assert device.capture_of(main) == device.capture_of(side) == 0


def test_a_branch_without_work_needs_no_join(device: Device) -> None:
    main, side, event = device.new_stream(), device.new_stream(), device.new_event()
    device.begin_capture(main)
    device.record(event, main)
    device.wait(event, side)
    device.end_capture(main)
    assert device.capture_of(side) == 0


def test_the_id_of_a_capturing_raw_stream_cannot_be_read(device: Device) -> None:
    handle = device.new_raw_stream()
    key = device.stream_id(handle)
    device.begin_capture(key)
    with pytest.raises(CaptureBroken, match="stream id query"):
        device.stream_id(handle)
    broken(device, key)


def test_the_driver_refuses_a_capturing_raw_stream_without_breaking_it(device: Device) -> None:
    handle = device.new_raw_stream()
    key = device.stream_id(handle)
    device.begin_capture(key)
    with pytest.raises(StreamError, match="capturing"):
        device.driver().stream_key(handle)
    device.end_capture(key)


def test_a_captured_stream_cannot_be_destroyed(device: Device) -> None:
    handle = device.new_raw_stream()
    key = device.stream_id(handle)
    device.begin_capture(key)
    with pytest.raises(CaptureBroken, match="destruction"):
        device.destroy_stream(handle)
    broken(device, key)


UNSAFE_CALLS: dict[str, Callable[[Device, int, int], object]] = {
    "malloc": lambda device, event, stream: device.malloc(512),
    "event query": lambda device, event, stream: device.query(event),
    "event synchronisation": lambda device, event, stream: device.synchronize_event(event),
    "stream query": lambda device, event, stream: device.query_stream(stream),
    "stream synchronisation": lambda device, event, stream: device.synchronize(stream),
}


@pytest.mark.parametrize("name", UNSAFE_CALLS)
@pytest.mark.parametrize("mode, hurts_own, hurts_others", [
    ("global", True, True), ("thread_local", True, False), ("relaxed", False, False),
])  # fmt: skip
def test_unsafe_calls_break_the_captures_their_mode_says(
    device: Device, name: str, mode: str, hurts_own: bool, hurts_others: bool
) -> None:
    """Also from a thread that knows nothing of the capture; never under ``device.relaxed()``."""
    other, event = device.new_stream(), device.new_event()
    device.record(event, other)
    call = UNSAFE_CALLS[name]

    def relaxed() -> None:
        with device.relaxed():
            call(device, event, other)

    for hurts, run in ((hurts_own, lambda act: catch(act)), (hurts_others, in_thread)):
        stream = device.new_stream()
        device.begin_capture(stream, mode=mode)
        assert run(relaxed) is None
        error = run(lambda: call(device, event, other))
        if hurts:
            assert isinstance(error, CaptureBroken) and name in str(error)
            broken(device, stream)
        else:
            assert error is None
            device.end_capture(stream)


def catch(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except CaptureBroken as error:
        return error
    return None


def test_free_breaks_a_global_capture(device: Device) -> None:
    address = device.malloc(512)
    stream = device.new_stream()
    device.begin_capture(stream)
    with pytest.raises(CaptureBroken, match="free"):
        device.free(address)
    broken(device, stream)
    device.free(address)


def test_the_caching_allocator_breaks_nothing(device: Device) -> None:
    """It calls the device in relaxed mode (c10's CUDAStreamCaptureModeGuard), so it may grow while others capture."""
    stream, other = device.new_stream(), device.new_stream()
    device.begin_capture(stream)
    device.alloc(64 << 20, stream)
    device.alloc(64 << 20, other)
    device.empty_cache()
    device.end_capture(stream)


def test_the_default_stream_cannot_be_captured(device: Device) -> None:
    with pytest.raises(CaptureError, match="default stream"):
        device.begin_capture(0)
    assert device.capture_of(0) == 0


@pytest.mark.parametrize("blocking", [True, False])
def test_the_default_stream_is_off_limits_while_a_blocking_stream_captures(device: Device, blocking: bool) -> None:
    stream = device.stream_id(device.new_raw_stream(blocking=blocking))
    device.begin_capture(stream)
    if blocking:
        with pytest.raises(CaptureBroken, match="StreamCaptureImplicit"):
            device.launch("eager", stream=0)
        broken(device, stream)
    else:
        device.launch("eager", stream=0)
        device.end_capture(stream)


def test_a_capture_ends_on_its_origin_only(device: Device) -> None:
    main, side, event = device.new_stream(), device.new_stream(), device.new_event()
    device.begin_capture(main)
    device.record(event, main)
    device.wait(event, side)
    with pytest.raises(CaptureError, match="Unmatched"):
        device.end_capture(side)
    with pytest.raises(CaptureError, match="already part of capture"):
        device.begin_capture(side)
    device.end_capture(main)


@pytest.mark.parametrize("mode, refused", [("global", True), ("thread_local", True), ("relaxed", False)])
def test_a_capture_ends_in_its_thread_unless_relaxed(device: Device, mode: str, refused: bool) -> None:
    stream = device.new_stream()
    device.begin_capture(stream, mode=mode)
    error = in_thread(lambda: device.end_capture(stream))
    assert isinstance(error, CaptureError) is refused
    assert (device.capture_of(stream) != 0) is refused


def test_an_aborted_capture_keeps_nothing(device: Device) -> None:
    main, side, event = device.new_stream(), device.new_stream(), device.new_event()
    device.begin_capture(main)
    device.record(event, main)
    device.wait(event, side)
    device.launch("forked", stream=side)
    device.abort_capture(main)
    assert device.capture_of(main) == device.capture_of(side) == 0
    with pytest.raises(CaptureError, match="not capturing"):
        device.abort_capture(main)


def test_watchers_hear_of_beginning_begin_and_end_without_the_lock(device: Device) -> None:
    heard: list[tuple] = []

    def free(*what: object) -> None:
        acquired: list[bool] = []

        def probe() -> None:
            acquired.append(device.lock.acquire(timeout=5))
            device.lock.release()

        assert in_thread(probe) is None
        heard.append((*what, acquired[0]))

    device.watch_captures(
        lambda stream: free("beginning", stream, device.capture_of(stream)),
        lambda stream, capture: free("began", stream, capture),
        lambda stream, capture, graph: free("ended", stream, capture, graph),
    )
    stream = device.new_stream()
    capture = device.begin_capture(stream)
    graph = device.end_capture(stream)
    assert heard == [
        ("beginning", stream, 0, True),
        ("began", stream, capture, True),
        ("ended", stream, capture, graph, True),
    ]
    second = device.begin_capture(stream)
    device.abort_capture(stream)
    assert heard[-1] == ("ended", stream, second, None, True)


def test_memset_is_captured_and_repeated_at_each_replay(device: Device) -> None:
    x = device.empty((16,), torch.uint8)
    stream = device.new_stream()
    device.begin_capture(stream)
    device.memset(x.data_ptr(), 16, 7, stream)
    graph = device.end_capture(stream)
    assert [node.kind for node in graph.nodes] == ["memset"]
    for _ in range(3):
        x.fill_(1)
        graph.launch(stream)
        assert x.tolist() == [7] * 16
