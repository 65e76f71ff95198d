"""Single tensors, whose bytes return with their storage, and persistent buffers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.workspace.scene import BYTES, MIB, SLAB, host, scene, write
from workspace.errors import CaptureError, LayoutError, SizeError, StreamError, WorkspaceError
from workspace.single import Single

SAFE = ["caching", "event_fenced", "per_stream"]
BLOCKS = ["event_fenced", "per_stream"]


@pytest.mark.parametrize("strategy", BLOCKS)
def test_bytes_return_when_the_last_view_dies(strategy: str) -> None:
    """A view keeps them; the next request gets the same ones."""
    _, ws = host(strategy)
    tensor = ws.empty((4, 64), torch.float32)
    address, view = tensor.data_ptr(), tensor[1:].view(-1)
    del tensor
    gc.collect()
    assert ws.snapshot().allocated == 1024
    del view
    assert ws.snapshot().allocated == 0
    assert ws.empty((4, 64), torch.float32).data_ptr() == address


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex64, torch.bool])
def test_shape_and_dtype_are_as_asked(strategy: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Scalars and empty tensors included."""
    _, ws = host(strategy)
    tensor = ws.empty(shape, dtype)
    assert tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous()


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("declared", [True, False])
def test_a_declared_use_of_a_single_tensor_is_ordered(strategy: str, declared: bool) -> None:
    """Also under `caching`, where the framework's allocator is told."""
    device, ws = scene(strategy)
    aux = ws.stream("aux")
    tensor = ws.empty((SLAB,), torch.uint8)
    device.launch("fill", writes=[tensor])
    ready = ws.event()
    ready.record()
    ready.wait(aux)
    device.launch("read", reads=[tensor], stream=aux.key)
    if declared:
        ws.use(tensor, aux)
    del tensor
    gc.collect()
    tensor = ws.empty((SLAB,), torch.uint8)
    device.launch("next", writes=[tensor])
    assert device.verdict() == ("SAFE" if declared else "UNSAFE")


def test_a_use_is_found_for_each_of_many() -> None:
    """Empty ones in between change nothing."""
    _, ws = scene()
    aux = ws.stream("aux")
    tensors = [ws.empty((size,), torch.uint8) for size in (0, 4, 0, 300, 0)]
    for tensor in tensors:
        ws.use(tensor, aux)
    del tensors[2]
    gc.collect()
    for tensor in tensors:
        ws.use(tensor, aux)
    del tensor
    tensors.clear()
    gc.collect()
    assert ws.snapshot().allocated == 0 and not ws.singles


def test_a_raw_stream_gets_no_single_tensor() -> None:
    """Its last use would be recorded when the handle may be gone: neither on it nor used there."""
    device, ws = scene()
    raw = device.new_raw_stream()
    with ws.on(raw), pytest.raises(StreamError, match="does not own"):
        ws.empty((4,), torch.uint8)
    tensor = ws.empty((4,), torch.uint8)
    with pytest.raises(StreamError, match="does not own"):
        ws.use(tensor, raw)
    device.destroy_stream(raw)
    del tensor
    gc.collect()
    assert ws.snapshot().allocated == 0


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_capture_gets_no_single_tensor(strategy: str) -> None:
    """It has no release point there."""
    _, ws = scene(strategy, reserve=MIB)
    with ws.on(ws.stream("main")), ws.capture(), pytest.raises(CaptureError, match="no release point"):
        ws.empty((4,), torch.uint8)


@pytest.mark.parametrize("shape", [(-1,), (2**62, 4), (1.5,), ("T",)])
def test_bad_shapes_are_refused(shape: tuple[Any, ...]) -> None:
    """As for layouts."""
    _, ws = scene()
    with pytest.raises((SizeError, LayoutError)):
        ws.empty(shape, torch.uint8)
    assert ws.snapshot().allocated == 0


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    """A collection of Python's own accord would come at any allocation."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collected_by_hand")
def test_a_finaliser_in_the_middle_of_an_acquire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collected inside the device's allocation: no lock is taken, no call made, and the bytes come back."""
    device, ws = scene()

    class Cycle:
        pass

    cycle: Any = Cycle()
    cycle.own, cycle.tensor = cycle, ws.empty((100,), torch.uint8)
    del cycle
    alloc = ws.driver.alloc
    collected: list[int] = []

    def collecting(nbytes: int, stream: int) -> Any:
        gc.collect()
        collected.append(len(ws.timeline.finished))
        return alloc(nbytes, stream)

    monkeypatch.setattr(ws.driver, "alloc", collecting)
    before = device.counters["record"]
    with ws.lease(BYTES, N=SLAB):
        assert collected == [1] and device.counters["record"] == before
        assert ws.snapshot().allocated == SLAB
    assert not ws.singles


def test_a_tensor_may_die_in_another_thread() -> None:
    """The finaliser leaves a note; whoever acquires next reads it."""
    _, ws = scene()
    box = [ws.empty((100,), torch.uint8)]
    thread = threading.Thread(target=box.clear)
    with ws.timeline.lock:  # a finaliser that took it would never return
        thread.start()
        thread.join(timeout=60)
    assert not thread.is_alive() and ws.snapshot().allocated == 0


@pytest.mark.parametrize("stamped", [True, False])
def test_the_last_use_is_stamped_when_the_queue_is_drained(monkeypatch: pytest.MonkeyPatch, stamped: bool) -> None:
    """Work enqueued up to the death is covered; without the stamp the next stream would race."""
    if not stamped:
        monkeypatch.setattr(Single, "stamped", lambda single, timeline: {single.stream.id: 0})
    device, ws = scene()
    tensor = ws.empty((SLAB,), torch.uint8)
    device.launch("use", writes=[tensor])
    del tensor
    gc.collect()
    write(device, ws, "other", SLAB, ws.stream("other"))
    assert device.verdict() == ("SAFE" if stamped else "UNSAFE")


@pytest.mark.parametrize("strategy", SAFE)
def test_a_persistent_buffer_is_zero_once(strategy: str) -> None:
    """The same tensor under the same name, zeroed when made and never again."""
    _, ws = host(strategy)
    counters = ws.persistent("counters", (64,), torch.int32)
    assert counters.sum() == 0
    counters.fill_(3)
    assert ws.persistent("counters", (64,), torch.int32) is counters and counters.sum() == 192
    assert ws.persistent("more", (64,), torch.int32).data_ptr() != counters.data_ptr()


def test_a_persistent_buffer_is_ordered_on_every_stream() -> None:
    """The host has waited for the zeroing."""
    device, ws = scene()
    buffer = ws.persistent("counters", (64,), torch.int32)
    device.launch("other", writes=[buffer], stream=ws.stream("other").key)
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize(("shape", "dtype"), [((32,), torch.int32), ((64,), torch.int64)])
def test_a_persistent_name_means_one_buffer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Another shape or dtype under a known name is a mistake."""
    _, ws = scene()
    ws.persistent("counters", (64,), torch.int32)
    with pytest.raises(LayoutError, match="one shape and dtype for each name"):
        ws.persistent("counters", shape, dtype)


def test_a_capture_gets_a_persistent_buffer_that_exists() -> None:
    """The first request blocks the host, which a capture cannot."""
    _, ws = scene(reserve=MIB)
    before = ws.persistent("before", (4,), torch.int32)
    with ws.on(ws.stream("main")), ws.capture():
        assert ws.persistent("before", (4,), torch.int32) is before
        with pytest.raises(CaptureError, match="before the capture"):
            ws.persistent("inside", (4,), torch.int32)


def test_a_closed_workspace_lends_nothing() -> None:
    """Neither leases, repeated ones included, nor tensors."""
    _, ws = scene(steady=True)
    lease = ws.lease(BYTES, N=4)
    with lease:
        pass
    ws.close()
    ws.close()
    for ask in (
        lease.__enter__,
        lambda: ws.acquire(BYTES, N=4),
        lambda: ws.empty((4,), torch.uint8),
        lambda: ws.persistent("p", (4,), torch.uint8),
        ws.reserve,
        ws.capture,
    ):
        with pytest.raises(WorkspaceError, match="is closed"):
            ask()
