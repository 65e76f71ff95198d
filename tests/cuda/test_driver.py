"""Each verb of the CUDA driver, on a device."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_void_p
from typing import Any

import pytest
import torch

from workspace.cuda import CudaDriver, cuda_driver
from workspace.errors import (
    CaptureBroken,
    CaptureError,
    DeviceError,
    DriverError,
    GraphError,
    OutOfMemory,
    SizeError,
    StreamError,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DELAY = 200_000_000
"""Cycles of a delay kernel: far longer than the host needs to enqueue a test."""

MIB = 1 << 20


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    yield cuda_driver("cuda")
    torch.cuda.synchronize()


@pytest.fixture
def side(driver: CudaDriver) -> int:
    return driver.new_stream("side")


def raw_stream(driver: CudaDriver) -> int:
    made = c_void_p()
    with driver._lib.current(driver._events._context):
        driver._lib.check(driver._lib.cuStreamCreate(byref(made), 1), "cuStreamCreate")
    assert made.value
    return made.value


def delayed_copy(driver: CudaDriver, source: torch.Tensor, out: torch.Tensor, stream: int) -> None:
    """Copy on a stream that is kept busy first."""
    before = driver.current_stream()
    driver.set_stream(stream)
    torch.cuda._sleep(DELAY)
    out.copy_(source)
    driver.set_stream(before)


class TestStreams:
    def test_torch_ids_are_zero_odd_and_handles(self, driver: CudaDriver) -> None:
        pool = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(32)]
        assert torch.cuda.default_stream().stream_id == 0
        assert all(stream.stream_id & 1 and stream.stream_id < 4096 for stream in pool)
        assert len({stream.stream_id for stream in pool}) == 64
        handle = raw_stream(driver)
        assert torch.cuda.ExternalStream(handle).stream_id == handle

    def test_one_stream_has_one_key_however_it_is_named(self, driver: CudaDriver) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            current = driver.current_stream()
        names: list[Any] = [stream, stream.cuda_stream, torch.cuda.ExternalStream(stream.cuda_stream)]
        assert {driver.stream_key(name) for name in names} == {current} == {stream.stream_id}
        assert driver.owned(current)
        assert driver.stream_key(torch.cuda.default_stream()) == 0

    def test_set_stream_makes_any_stream_current(self, driver: CudaDriver, side: int) -> None:
        handle = raw_stream(driver)
        key = driver.stream_key(handle)
        for wanted in (side, key, 0):
            driver.set_stream(wanted)
            assert driver.current_stream() == wanted
        assert not driver.owned(key)

    def test_new_streams_differ_from_each_other_and_from_the_pool(self, driver: CudaDriver) -> None:
        made = {driver.new_stream(f"s{index}") for index in range(40)}
        assert len(made) == 40
        assert not made & {torch.cuda.Stream().stream_id for _ in range(32)}

    def test_a_reused_handle_is_another_stream(self, driver: CudaDriver) -> None:
        first = raw_stream(driver)
        key = driver.stream_key(first)
        driver._lib.cuStreamDestroy_v2(first)
        made = [raw_stream(driver)]
        while made[-1] != first and len(made) < 512:
            made.append(raw_stream(driver))
        if made[-1] != first:
            pytest.skip("the driver did not reuse the handle")
        assert driver.stream_key(first) != key
        with pytest.raises(StreamError, match="handle reused"):
            driver.set_stream(key)

    def test_none_and_numbers_that_are_no_streams_are_refused(self, driver: CudaDriver) -> None:
        for bad in (None, 4, "main"):
            with pytest.raises(StreamError):
                driver.stream_key(bad)

    def test_a_thread_that_never_used_cuda_can_use_every_verb(self, driver: CudaDriver, side: int) -> None:
        failed: list[BaseException] = []

        def work() -> None:
            try:
                event = driver.new_event()
                for stream in (side, 0):
                    driver.record(event, stream)
                    driver.wait(event, stream)
                    driver.synchronize(stream)
                driver.synchronize_event(event)
                assert driver.done(event)
                assert driver.current_stream() == 0
                driver.free_event(event)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert failed == []


class TestEvents:
    def test_an_event_is_done_only_once_the_work_before_it_is(self, driver: CudaDriver, side: int) -> None:
        event = driver.new_event()
        driver.set_stream(side)
        torch.cuda._sleep(DELAY)
        driver.set_stream(0)
        driver.record(event, side)
        assert not driver.done(event)
        driver.synchronize_event(event)
        assert driver.done(event)
        driver.free_event(event)

    @pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "control"])
    def test_a_wait_orders_a_refill_after_a_slow_reader(self, driver: CudaDriver, side: int, fenced: bool) -> None:
        buffer, out = driver.alloc(16 * MIB, 0), torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
        block = driver.tensor(buffer, 0, (16 * MIB,), torch.uint8)
        event = driver.new_event()
        driver.memset(buffer.address, buffer.nbytes, 17, 0)
        driver.record(event, 0)
        driver.wait(event, side)
        delayed_copy(driver, block, out, side)
        driver.record(event, side)
        if fenced:
            driver.wait(event, 0)
        driver.memset(buffer.address, buffer.nbytes, 93, 0)
        driver.synchronize()
        assert bool((out == 17).all()) is fenced

    def test_waiting_for_an_event_never_recorded_waits_for_nothing(self, driver: CudaDriver, side: int) -> None:
        event = driver.new_event()
        driver.wait(event, side)
        driver.synchronize(side)
        assert driver.done(event)

    def test_a_failing_call_says_what_failed(self, driver: CudaDriver) -> None:
        key = driver.new_stream("s")
        with pytest.raises(DriverError, match=r"cuEventRecord\(event=0x0.*CUDA_ERROR_INVALID_HANDLE \(400\)"):
            driver.record(0, key)


def test_a_sticky_error_says_so_from_every_verb_that_meets_it() -> None:
    program = """
import torch
from workspace.cuda import cuda_driver
from workspace.errors import DriverError
driver = cuda_driver("cuda")
torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
event = driver.new_event()
calls = [driver.synchronize, lambda: driver.record(event, 0), lambda: driver.done(event)]
for call in [*calls, lambda: driver.alloc(1 << 30, 0)]:
    try:
        call()
    except DriverError as error:
        assert error.fields["sticky"], error
        assert "start a new process" in str(error)
    else:
        raise AssertionError(f"{call} succeeded")
print("all sticky")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "all sticky" in done.stdout, done.stderr[-2000:]


class TestMemory:
    def test_a_buffer_is_aligned_and_comes_back_when_dropped(self, driver: CudaDriver, side: int) -> None:
        gc.collect()
        before = torch.cuda.memory_allocated()
        buffer = driver.alloc(3 * MIB + 1, side)
        assert buffer.address % 256 == 0
        assert torch.cuda.memory_allocated() > before
        tensor = driver.tensor(buffer, 256, (4,), torch.int64)
        del buffer
        assert torch.cuda.memory_allocated() > before
        del tensor
        assert torch.cuda.memory_allocated() == before

    def test_tensors_work_and_report_their_death(self, driver: CudaDriver) -> None:
        deaths: list[int] = []
        buffer = driver.alloc(4096, 0)
        tensor = driver.tensor(buffer, 512, (8, 16), torch.bfloat16, lambda: deaths.append(1))
        assert driver.address_of(tensor) == buffer.address + 512
        assert (tensor.fill_(2) @ tensor.t()).sum().item() == 8 * 8 * 16 * 4
        view = tensor[2:]
        del tensor
        assert deaths == []
        del view
        assert deaths == [1]

    def test_the_driver_allocates_on_the_stream_it_is_told(self, driver: CudaDriver, side: int) -> None:
        buffer = driver.alloc(64 * MIB, side)
        address = buffer.address
        del buffer
        assert driver.alloc(64 * MIB, side).address == address
        assert driver.current_stream() == 0

    def test_too_much_is_out_of_memory_with_figures(self, driver: CudaDriver) -> None:
        with pytest.raises(OutOfMemory, match="bytes free") as refused:
            driver.alloc(1 << 50, 0)
        assert refused.value.fields["asked"] == 1 << 50
        assert "of -1 bytes free" not in str(refused.value)
        driver.alloc(MIB, 0)

    def test_bad_sizes_values_and_devices_are_refused(self, driver: CudaDriver) -> None:
        with pytest.raises(SizeError):
            driver.alloc(-1, 0)
        with pytest.raises(SizeError):
            driver.memset(0, 16, 256, 0)
        with pytest.raises(DeviceError):
            driver.address_of(torch.empty(1))

    def test_memset_of_nothing_and_beyond_two_gibibytes(self, driver: CudaDriver) -> None:
        driver.memset(0, 0, 0, 0)
        nbytes = (1 << 31) + 256
        buffer = driver.alloc(nbytes, 0)
        driver.memset(buffer.address, nbytes, 7, 0)
        assert driver.tensor(buffer, nbytes - 1, (1,), torch.uint8).item() == 7

    @pytest.mark.parametrize("declared", [True, False], ids=["declared", "control"])
    def test_a_recorded_use_keeps_bytes_from_the_allocator(self, driver: CudaDriver, side: int, declared: bool) -> None:
        buffer = driver.alloc(32 * MIB, 0)
        address = buffer.address
        out = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        driver.synchronize()
        delayed_copy(driver, driver.tensor(buffer, 0, (32 * MIB,), torch.uint8), out, side)
        if declared:
            driver.record_use(buffer, side)
        del buffer
        assert (driver.alloc(32 * MIB, 0).address == address) is not declared

    def test_an_empty_tensor_belongs_to_the_stream_it_is_for(self, driver: CudaDriver, side: int) -> None:
        for stream in (side, 0):
            address = driver.empty((48, MIB), torch.uint8, stream).data_ptr()
            assert driver.empty((48, MIB), torch.uint8, stream).data_ptr() == address
        with pytest.raises(OutOfMemory, match="bytes free"):
            driver.empty((1 << 50,), torch.uint8, side)
        assert driver.current_stream() == 0

    def test_bytes_are_read_once_the_device_is_idle(self, driver: CudaDriver, side: int) -> None:
        buffer = driver.alloc(4096, side)
        driver.memset(buffer.address, 4096, 3, side)
        driver.set_stream(side)
        torch.cuda._sleep(DELAY)
        driver.set_stream(0)
        driver.memset(buffer.address + 1024, 2, 7, side)
        assert driver.read(buffer, 1023, 4) == bytes([3, 7, 7, 3])
        assert driver.read(buffer, 0, 0) == b""

    def test_trim_returns_cached_memory(self, driver: CudaDriver) -> None:
        driver.alloc(256 * MIB, 0)
        reserved = torch.cuda.memory_reserved()
        driver.trim()
        assert torch.cuda.memory_reserved() < reserved


class TestCaptures:
    def test_a_capture_is_known_by_its_identity_on_every_stream_it_reaches(self, driver: CudaDriver, side: int) -> None:
        main = driver.new_stream("main")
        block = driver.alloc(MIB, main)
        event, joined = driver.new_event(), driver.new_event()
        identity = driver.begin_capture(main)
        assert identity
        assert driver.capture_of(main) == identity
        assert driver.capture_of(side) == 0
        driver.record(event, main)
        driver.wait(event, side)
        assert driver.capture_of(side) == identity
        driver.memset(block.address, MIB, 5, side)
        driver.record(joined, side)
        driver.wait(joined, main)
        graph = driver.end_capture(main)
        assert driver.capture_of(main) == 0
        driver.memset(block.address, MIB, 1, main)
        graph.launch(main)
        driver.synchronize(main)
        assert bool((driver.tensor(block, 0, (MIB,), torch.uint8) == 5).all())
        again = driver.begin_capture(main, share=graph)
        assert again not in (0, identity)
        driver.memset(block.address, MIB, 6, main)
        driver.end_capture(main).reset()

    def test_every_capture_torch_begins_is_noticed(self, driver: CudaDriver) -> None:
        seen: list[tuple[Any, ...]] = []
        driver.watch_captures(
            lambda stream: seen.append(("beginning", stream, driver.capture_of(stream))),
            lambda stream, capture: seen.append(("began", stream, capture == driver.capture_of(stream))),
            lambda stream, capture, graph: seen.append(("ended", stream, graph is not None)),
        )
        stream = torch.cuda.Stream()
        x = torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            x.add_(1)
        key = stream.stream_id
        assert seen == [("beginning", key, 0), ("began", key, True), ("ended", key, True)]

    def test_a_graph_of_torch_is_not_kept_alive_and_its_release_is_told(self, driver: CudaDriver) -> None:
        graphs: list[Any] = []
        driver.watch_captures(lambda _: None, lambda *_: None, lambda *ended: graphs.append(ended[2]))
        x = torch.ones(4, device="cuda")
        raw = torch.cuda.CUDAGraph()
        with torch.cuda.graph(raw):
            x.add_(1)
        called: list[int] = []
        driver.on_graph_release(graphs[0], lambda: called.append(1))
        raw.replay()
        driver.synchronize()
        assert graphs[0].raw is raw
        assert called == []
        del raw
        gc.collect()
        assert _soon(driver, lambda: called == [1])
        with pytest.raises(GraphError, match="is gone"):
            graphs[0].launch(driver.new_stream("s"))

    def test_a_release_is_told_only_after_the_launches_in_flight(self, driver: CudaDriver, side: int) -> None:
        block = driver.alloc(MIB, side)
        driver.begin_capture(side)
        driver.set_stream(side)
        torch.cuda._sleep(DELAY)
        driver.set_stream(0)
        driver.memset(block.address, MIB, 5, side)
        graph = driver.end_capture(side)
        called: list[int] = []
        driver.on_graph_release(graph, lambda: called.append(1))
        event = driver.new_event()
        graph.launch(side)
        driver.record(event, side)
        graph.reset()
        driver.poll()
        assert driver.done(event) or called == []
        driver.synchronize(side)
        assert _soon(driver, lambda: called == [1])

    @pytest.mark.parametrize("relaxed", [True, False], ids=["driver", "control"])
    def test_calls_from_another_thread_leave_a_global_capture_alone(
        self, driver: CudaDriver, side: int, relaxed: bool
    ) -> None:
        main, other = driver.new_stream("main"), driver.new_stream("other")
        event, handle = driver.new_event(), raw_stream(driver)
        driver.record(event, other)
        block = driver.alloc(MIB, main)
        driver.begin_capture(main, mode="global")
        driver.memset(block.address, MIB, 5, main)
        failed: list[BaseException] = []

        def calls() -> None:
            try:
                if not relaxed:
                    driver._lib.check(driver._lib.cuEventQuery(event), "cuEventQuery")
                    return
                driver.done(event)
                driver.synchronize_event(event)
                driver.synchronize(other)
                driver.synchronize()
                driver.alloc(768 * MIB, other)
                driver.stream_key(handle)
                driver.new_stream("more")
                driver.free_event(driver.new_event())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
        if relaxed:
            assert failed == []
            driver.end_capture(main).reset()
        else:
            assert failed
            with pytest.raises(CaptureError):
                driver.end_capture(main)
        driver.trim()

    def test_a_broken_capture_leaves_stream_and_allocator_usable(self, driver: CudaDriver) -> None:
        main = driver.new_stream("main")
        identity = driver.begin_capture(main)
        code = driver._lib.cuStreamSynchronize(main)
        assert code
        assert driver.capture_of(main) == identity
        driver.abort_capture(main)
        assert driver.capture_of(main) == 0
        driver.trim()
        block = driver.alloc(MIB, main)
        driver.begin_capture(main)
        driver.memset(block.address, MIB, 5, main)
        driver.end_capture(main).launch(main)
        driver.synchronize(main)

    def test_an_unjoined_branch_breaks_the_capture(self, driver: CudaDriver, side: int) -> None:
        main = driver.new_stream("main")
        block, event = driver.alloc(MIB, main), driver.new_event()
        driver.begin_capture(main)
        driver.record(event, main)
        driver.wait(event, side)
        driver.memset(block.address, MIB, 5, side)
        with pytest.raises(CaptureError, match="is invalid"):
            driver.end_capture(main)
        assert driver.capture_of(side) == 0
        driver.trim()

    def test_what_a_capture_cannot_do_is_refused_or_typed(self, driver: CudaDriver) -> None:
        main = driver.new_stream("main")
        with pytest.raises(CaptureError, match="default stream"):
            driver.begin_capture(0)
        with pytest.raises(CaptureError, match="no capture was begun"):
            driver.end_capture(main)
        driver.begin_capture(main)
        with pytest.raises(CaptureError, match="reserve before"):
            driver.alloc(MIB, main)
        driver.trim()
        event = driver.new_event()
        driver.record(event, main)
        with pytest.raises(CaptureBroken):
            driver.done(event)
        driver.abort_capture(main)

    def test_a_raw_capture_is_seen_by_asking(self, driver: CudaDriver, side: int) -> None:
        lib, graph = driver._lib, c_void_p()
        lib.check(lib.cuStreamBeginCapture_v2(side, 1), "cuStreamBeginCapture")
        assert not driver._graphs.capturing
        assert driver.capture_of(side)
        lib.check(lib.cuStreamEndCapture(side, byref(graph)), "cuStreamEndCapture")
        lib.cuGraphDestroy(graph)

    def test_a_raw_stream_that_captures_is_refused_unasked(self, driver: CudaDriver) -> None:
        lib, graph, handle = driver._lib, c_void_p(), raw_stream(driver)
        lib.check(lib.cuStreamBeginCapture_v2(handle, 1), "cuStreamBeginCapture")
        with pytest.raises(StreamError, match="never seen before"):
            driver.stream_key(handle)
        status = c_int()
        lib.check(lib.cuStreamIsCapturing(handle, byref(status)), "cuStreamIsCapturing")
        assert status.value == 1
        lib.check(lib.cuStreamEndCapture(handle, byref(graph)), "cuStreamEndCapture")
        lib.cuGraphDestroy(graph)

    def test_replays_advance_random_generators(self, driver: CudaDriver, side: int) -> None:
        x = torch.empty(1024, device="cuda")
        driver.begin_capture(side)
        driver.set_stream(side)
        x.uniform_()
        driver.set_stream(0)
        graph = driver.end_capture(side)
        drawn = []
        for _ in range(2):
            graph.launch(side)
            driver.synchronize(side)
            drawn.append(x.clone())
        assert not torch.equal(*drawn)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
class TestDevices:
    def test_the_current_device_stays_what_it_was(self) -> None:
        driver = cuda_driver("cuda:1")
        torch.cuda.set_device(0)
        side, event = driver.new_stream("side"), driver.new_event()
        buffer = driver.alloc(MIB, side)
        for stream in (side, 0):
            driver.memset(buffer.address, MIB, 3, stream)
            driver.record(event, stream)
            driver.wait(event, stream)
            driver.synchronize(stream)
        tensor = driver.tensor(buffer, 0, (MIB,), torch.uint8)
        driver.set_stream(side)
        assert torch.cuda.current_device() == 0
        assert driver.current_stream() == side
        driver.set_stream(0)
        assert tensor.device.index == 1
        assert bool((tensor == 3).all())

    def test_the_default_stream_is_that_of_the_driver_not_of_the_current_device(self) -> None:
        driver = cuda_driver("cuda:1")
        torch.cuda.set_device(0)
        event = driver.new_event()
        with torch.cuda.device(1):
            torch.cuda._sleep(DELAY)
        driver.record(event, 0)
        assert not driver.done(event)
        driver.synchronize(0)
        assert driver.done(event)

    def test_captures_stay_on_their_device_and_are_told_to_its_driver_alone(self) -> None:
        first, second = cuda_driver("cuda:0"), cuda_driver("cuda:1")
        torch.cuda.set_device(0)
        told: list[str] = []
        for driver in (first, second):
            driver.watch_captures(lambda _: None, lambda *_, name=driver.name: told.append(name), lambda *_: None)
        side = second.new_stream("side")
        block = second.alloc(MIB, side)
        second.begin_capture(side)
        second.memset(block.address, MIB, 5, side)
        graph = second.end_capture(side)
        second.memset(block.address, MIB, 1, side)
        graph.launch(side)
        second.synchronize(side)
        assert bool((second.tensor(block, 0, (MIB,), torch.uint8) == 5).all())
        assert told == ["cuda:1"]
        assert torch.cuda.current_device() == 0

    def test_a_stream_of_another_device_is_refused(self) -> None:
        driver = cuda_driver("cuda:1")
        with torch.cuda.device(0), pytest.raises(StreamError, match="is on cuda:0"):
            driver.stream_key(torch.cuda.Stream())
        with pytest.raises(StreamError, match="another device"):
            driver.stream_key(raw_stream(cuda_driver("cuda:0")))


def _soon(driver: CudaDriver, condition: Callable[[], bool]) -> bool:
    """Poll until a condition holds. CUDA's own thread runs destructors a moment after the last launch."""
    for _ in range(1_000_000):
        driver.poll()
        if condition():
            return True
    return False
