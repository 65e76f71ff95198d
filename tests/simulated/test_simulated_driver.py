"""The seam on the simulated device: identity of streams, relaxed verbs, tensors over buffers."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES
from workspace.driver import Driver
from workspace.errors import CaptureBroken, DeviceError, LayoutError, StreamError, Unsupported
from workspace.simulated import Device, SimulatedDriver, VirtualTensor


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def driver(device: Device) -> SimulatedDriver:
    return device.driver()


def test_every_verb_of_the_protocol_takes_the_protocols_arguments(driver: SimulatedDriver) -> None:
    for name, verb in inspect.getmembers(Driver, inspect.isfunction):
        if name.startswith("_") or name == "current_stream":  # a C callable, without a signature to read
            continue
        expected = [parameter for parameter in inspect.signature(verb).parameters if parameter != "self"]
        mine = list(inspect.signature(getattr(driver, name)).parameters)
        assert mine[: len(expected)] == expected, name


def test_a_device_has_one_driver(device: Device) -> None:
    assert device.driver() is device.driver()


def test_none_and_streams_of_another_device_are_refused(device: Device, driver: SimulatedDriver) -> None:
    key = device.new_stream()
    assert driver.stream_key(key) == driver.stream_key(device.stream(key)) == key
    with pytest.raises(StreamError, match="None is not a stream"):
        driver.stream_key(None)
    with pytest.raises(StreamError, match="another device"):
        driver.stream_key(Device().stream(0))
    for wrong in ("main", 1.5, True, object()):
        with pytest.raises(StreamError, match="is not a stream"):
            driver.stream_key(wrong)
    with pytest.raises(StreamError, match="not known"):
        driver.stream_key(77)


@pytest.mark.parametrize("wrong", [12345, 1 << 50])
def test_who_passes_a_number_is_told_of_names(wrong: int) -> None:
    """And of nothing that a workspace has not."""
    ws = workspace.create(device=Device())
    with pytest.raises(StreamError, match="not") as caught:
        ws.on(wrong)
    assert caught.value.remedy.startswith("pass ws.stream(name), ")
    assert "stream_id" not in str(caught.value) and " new_stream" not in str(caught.value)


@pytest.mark.parametrize(("wrong", "remedy"), [("aux", "pass ws.stream('aux'), "), (1.5, "pass ws.stream(name), ")])
def test_who_passes_a_name_is_told_how_to_get_its_stream(driver: SimulatedDriver, wrong: object, remedy: str) -> None:
    with pytest.raises(StreamError) as caught:
        driver.stream_key(wrong)
    assert caught.value.remedy.startswith(remedy)


def test_raw_handles_are_identified_anew_at_each_call(device: Device, driver: SimulatedDriver) -> None:
    handle = device.new_raw_stream()
    first = driver.stream_key(handle)
    assert driver.owned(device.new_stream()) and driver.owned(0) and not driver.owned(first)
    device.destroy_stream(handle)
    with pytest.raises(StreamError):
        driver.stream_key(handle)
    assert device.new_raw_stream() == handle
    assert driver.stream_key(handle) != first


def test_objects_of_cuda_core_are_known_by_their_protocol(device: Device, driver: SimulatedDriver) -> None:
    handle = device.new_raw_stream()

    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, handle)

    assert driver.stream_key(Foreign()) == device.stream_id(handle)


@pytest.mark.parametrize("relaxed", [True, False])
def test_no_verb_of_the_driver_breaks_a_capture_elsewhere(
    device: Device, driver: SimulatedDriver, relaxed: bool
) -> None:
    capturing, other, event = device.new_stream(), device.new_stream(), driver.new_event()
    driver.record(event, other)
    driver.begin_capture(capturing)
    if relaxed:
        assert driver.done(event)
        driver.synchronize_event(event)
        driver.synchronize(other)
        driver.alloc(64 << 20, other)
        driver.trim()
        assert driver.capture_of(other) == 0
        driver.end_capture(capturing)
    else:  # the control: the device's own query is not relaxed
        with pytest.raises(CaptureBroken):
            device.query(event)


@pytest.mark.parametrize("memory", ["host", "virtual"])
def test_a_tensor_keeps_its_buffer_until_its_last_view_dies(memory: str) -> None:
    device = Device(memory=memory)
    driver, died = device.driver(), []
    buffer = driver.alloc(4096, 0)
    address = buffer.address
    tensor = driver.tensor(buffer, 512, (16, 8), torch.bfloat16, lambda: died.append(1))
    assert driver.address_of(tensor) == address + 512 and tuple(tensor.shape) == (16, 8)
    view = tensor[2:4]
    assert driver.address_of(view) == address + 512 + 32
    del buffer, tensor
    gc.collect()
    assert died == [] and device.statistics.allocated == 4096
    del view
    gc.collect()
    assert died == [1] and device.statistics.allocated == 0


def test_tensors_over_one_buffer_have_storages_of_their_own(driver: SimulatedDriver) -> None:
    buffer = driver.alloc(4096, 0)
    first = driver.tensor(buffer, 0, (16,), torch.float32)
    second = driver.tensor(buffer, 32, (16,), torch.float32)
    first.fill_(1)
    assert second[:8].tolist() == [1.0] * 8
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 64
    assert not first.is_inference()


@pytest.mark.parametrize("offset, count", [(0, 1025), (4096, 1), (-4, 1)])
def test_a_tensor_outside_its_buffer_is_refused(driver: SimulatedDriver, offset: int, count: int) -> None:
    buffer = driver.alloc(4096, 0)
    with pytest.raises(DeviceError, match="does not fit"):
        driver.tensor(buffer, offset, (count,), torch.float32)


def test_read_returns_bytes_once_the_device_is_idle() -> None:
    device = Device(execution="deferred")
    driver = device.driver()
    buffer = driver.alloc(64, 0)
    driver.memset(buffer.address, 64, 0xCB, 0)
    assert driver.read(buffer, 8, 4) == b"\xcb" * 4
    virtual = Device(memory="virtual").driver()
    with pytest.raises(Unsupported, match="no bytes"):
        virtual.read(virtual.alloc(64, 0), 0, 4)


def test_memset_outside_device_memory_is_refused(driver: SimulatedDriver) -> None:
    foreign = torch.zeros(16)
    with pytest.raises(DeviceError, match="no live segment"):
        driver.memset(foreign.data_ptr(), 64, 1, 0)
    assert foreign.eq(0).all()


def test_owners_are_attributed_only_where_a_log_can_tell() -> None:
    assert Device().driver().attributes and not Device(log=False).driver().attributes


@pytest.mark.parametrize("memory", ["host", "virtual"])
def test_sizes_beyond_int32(memory: str) -> None:
    device = Device(memory=memory)
    tensor = device.empty((70_000, 40_000), torch.uint8)
    last = tensor[69_999:]
    assert device.driver().address_of(last) - device.driver().address_of(tensor) == 69_999 * 40_000
    if memory == "host":
        tensor[-1, -1] = 7
        assert int(tensor[-1, -1]) == 7


def test_virtual_tensors_have_shapes_rows_and_no_bytes() -> None:
    device = Device(memory="virtual")
    x = device.empty((4, 6), torch.float32)
    assert isinstance(x, VirtualTensor)
    assert (x.numel(), x.element_size(), x.nbytes, x.dim(), len(x)) == (24, 4, 96, 2, 4)
    assert x.view(2, 12).address == x.address and x[1:3].shape == (2, 6) and x[1:3].address == x.address + 24
    with pytest.raises(LayoutError, match="elements"):
        x.view(5)
    with pytest.raises(LayoutError, match="step"):
        x[::2]


def test_strided_tensors_touch_their_own_bytes_only(device: Device) -> None:
    """Columns of one matrix are interleaved, not overlapping."""
    x = device.empty((8, 4), torch.float32)
    device.launch("left", writes=[x[:, :2]], stream=device.new_stream())
    device.launch("right", writes=[x[:, 2:]], stream=device.new_stream())
    assert device.verdict() == "SAFE"
    device.launch("middle", reads=[x[:, 1:3]], stream=device.new_stream())
    assert {race.first.label for race in device.races()} == {"left", "right"}


def test_what_names_no_bytes_is_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match="names no bytes"):
        device.launch("op", reads=["x"])
    empty = torch.empty(0)
    device.launch("op", reads=[empty, (0, 0)], writes=[device.alloc(8)])


def test_a_stream_that_was_destroyed_is_nobodys() -> None:
    """As on CUDA, whose driver forgets the handle: whoever looks through all streams ever seen meets no error."""
    device = Device(memory="virtual")
    driver = device.driver()
    raw = device.new_raw_stream("raw")
    key = driver.stream_key(raw)
    assert not driver.owned(key) and driver.owned(0)
    device.destroy_stream(raw)
    assert not driver.owned(key)


@pytest.mark.parametrize("known", [True, False])
def test_a_raw_stream_that_captures_is_who_it_was(known: bool) -> None:
    """One identified before keeps its key, as CUDA's driver has it; to ask one never seen would break the capture."""
    device = Device(memory="virtual")
    driver = device.driver()
    old = device.new_raw_stream("old")
    stale = driver.stream_key(old)
    device.destroy_stream(old)
    raw = device.new_raw_stream("raw")
    assert raw == old, "the handle comes up again"
    key = driver.stream_key(raw) if known else 0
    device.begin_capture(device.streams.by_handle(raw).key, "relaxed")
    if known:
        assert driver.stream_key(raw) == key != stale
    else:
        with pytest.raises(StreamError, match="cannot be identified"):
            driver.stream_key(raw)
    device.end_capture(device.streams.by_handle(raw).key)
    assert driver.stream_key(raw) != stale


def test_a_raw_stream_is_a_branch_of_a_captured_fork() -> None:
    """Named by its handle in the branch, and in a use by hand, as outside captures."""
    device = Device(memory="virtual")
    ws = workspace.create("event_fenced", device=device)
    ws.declare(BYTES, N=4096)
    ws.reserve()
    raw = device.new_raw_stream("raw")
    with torch.no_grad(), ws.on(ws.stream("main")), ws.capture() as capture:
        with ws.lease(BYTES, N=64) as lease, ws.fork(raw) as branch:
            with branch(raw):
                device.launch("write", writes=[lease.x])
            ws.use(lease, raw)
    capture.graph.replay()
    assert device.verdict() == "SAFE"
