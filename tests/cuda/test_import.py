"""Everything of the CUDA driver that needs no device."""

from __future__ import annotations

import contextlib
import gc
import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.retaining import Retaining
from workspace import cuda
from workspace.cuda import captures, libcuda, memory, releases
from workspace.cuda.streams import RAW, Streams
from workspace.errors import CaptureBroken, CaptureError, DeviceError, DriverError, SizeError, StreamError, Unsupported


def test_importing_touches_neither_cuda_nor_libcuda() -> None:
    program = (
        "import ctypes, torch\n"
        "def refuse(*_, **__): raise AssertionError('libcuda was loaded')\n"
        "import workspace.cuda.libcuda as libcuda\n"
        "libcuda.ctypes.CDLL = refuse\n"
        "import workspace.cuda\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert '_workspace_watches' not in torch.cuda.CUDAGraph.__dict__\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build of PyTorch has CUDA")
def test_a_cpu_build_is_refused_when_a_driver_is_made() -> None:
    with pytest.raises(Unsupported, match="has no CUDA"):
        cuda.cuda_driver("cuda")


def test_a_device_that_is_not_cuda_is_refused() -> None:
    with pytest.raises(DeviceError, match="cpu is no CUDA device"):
        cuda.cuda_driver("cpu")


def test_a_missing_libcuda_is_unsupported_not_an_os_error() -> None:
    with pytest.raises(Unsupported, match="could not be loaded"):
        libcuda.LibCuda("libcuda-that-is-not-there.so.1")


def test_a_library_without_the_functions_is_unsupported_and_names_one() -> None:
    with pytest.raises(Unsupported, match="has no cuInit"):
        libcuda.LibCuda("libc.so.6")


class TestFailure:
    """The error of a failing call names call, values, code and remedy."""

    def test_an_ordinary_error_leaves_the_process_usable(self) -> None:
        error = libcuda.failure("CUDA_ERROR_INVALID_HANDLE (400): bad", 400, "cuEventRecord", event="0x1")
        assert isinstance(error, DriverError)
        assert not error.fields["sticky"]
        assert "cuEventRecord(event=0x1) failed: CUDA_ERROR_INVALID_HANDLE (400)" in str(error)

    @pytest.mark.parametrize("code", [700, 719])
    def test_a_sticky_error_says_that_the_context_is_lost(self, code: int) -> None:
        error = libcuda.failure("text", code, "cuEventQuery")
        assert error.fields["sticky"]
        assert "start a new process" in str(error)

    def test_a_capture_error_says_when_the_call_is_legal(self) -> None:
        error = libcuda.failure("text", 900, "cuStreamSynchronize")
        assert isinstance(error, CaptureBroken)
        assert "before the capture begins" in str(error)

    def test_a_torch_error_with_a_code_becomes_the_same(self) -> None:
        lost = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        lost.error_code = 700  # type: ignore[attr-defined]
        error = memory.torch_failure(lost, "torch.empty", nbytes=4)
        assert error.fields["sticky"]
        assert "torch.empty(nbytes=4) failed: CUDA error: an illegal memory access" in str(error)
        assert not memory.torch_failure(RuntimeError("else"), "torch.empty").fields["sticky"]


class _FakeStreams(Streams):
    """The table without a device: two pool streams and the default one."""

    def __init__(self, lib: Any = None) -> None:
        self._lib, self._index, self._context = lib, 0, 0xC0
        self.handles, self._keys = {0: 0, 3: 0x10000, 35: 0x10040}, {0: 0, 1: 0, 0x10000: 3, 0x10040: 35}
        self._raw, self._raw_keys, self._objects = {}, {}, {}


class _Ids:
    """Answers of libcuda about raw streams."""

    def __init__(self) -> None:
        self.identity, self.capturing, self.context = 7, 0, 0xC0

    def capture_status(self, _: int) -> tuple[int, int]:
        return 0, self.capturing

    def cuStreamGetId(self, _: int, identity: Any) -> int:
        assert not self.capturing, "asking a capturing stream for its id breaks the capture"
        identity._obj.value = self.identity
        return 0

    def cuStreamGetCtx(self, _: int, context: Any) -> int:
        context._obj.value = self.context
        return 0

    check = libcuda.LibCuda.check
    text = libcuda.LibCuda.text


class TestStreamKeys:
    """Keys: torch's ids for its own streams, ids of libcuda for raw ones."""

    def test_the_default_stream_is_key_zero_under_each_of_its_names(self) -> None:
        streams = _FakeStreams()
        assert [streams.key(handle) for handle in (0, 1)] == [0, 0]

    def test_a_raw_handle_of_a_pool_stream_is_the_pool_stream(self) -> None:
        assert _FakeStreams().key(0x10040) == 35

    def test_a_reused_handle_gets_a_new_key_and_the_old_key_dies(self) -> None:
        ids = _Ids()
        streams = _FakeStreams(ids)
        first = streams.key(0x20000)
        assert first == RAW | 7
        assert streams.live_handle(first) == 0x20000
        assert not streams.owned(first)
        ids.identity = 8
        with pytest.raises(StreamError, match="handle reused"):
            streams.live_handle(first)
        assert streams.key(0x20000) == RAW | 8
        with pytest.raises(StreamError, match="handle reused"):
            streams.key(first)

    def test_a_raw_stream_first_seen_capturing_is_refused_and_a_known_one_keeps_its_key(self) -> None:
        ids = _Ids()
        streams = _FakeStreams(ids)
        known = streams.key(0x20000)
        ids.capturing = 1
        assert streams.key(0x20000) == known
        with pytest.raises(StreamError, match="capturing and was never seen"):
            streams.key(0x30000)

    def test_a_raw_stream_of_another_device_is_refused(self) -> None:
        ids = _Ids()
        ids.context = 0xD0
        with pytest.raises(StreamError, match="another device"):
            _FakeStreams(ids).key(0x20000)

    @pytest.mark.parametrize("bad", [None, "cuda", 5, 17, -8, 12, RAW | 3, 2])
    def test_what_is_no_stream_is_refused_before_cuda_sees_it(self, bad: object) -> None:
        with pytest.raises(StreamError):
            _FakeStreams().key(bad)

    def test_an_object_with_the_stream_protocol_is_taken_by_its_handle(self) -> None:
        class Foreign:
            def __cuda_stream__(self) -> tuple[int, int]:
                return (0, 0x10000)

        assert _FakeStreams().key(Foreign()) == 3


class TestNoticing:
    """The wrapper of capture_begin and capture_end."""

    def make(self) -> type:
        class Graph:
            def __init__(self) -> None:
                self.calls: list[str] = []

            def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
                """Begins."""
                self.calls.append("begin")

            def capture_end(self) -> None:
                self.calls.append("end")
                if "fail" in self.calls:
                    raise RuntimeError("capture invalidated")

        return Graph

    def test_installing_twice_wraps_once_and_keeps_the_signature(self) -> None:
        graph_class: Any = self.make()
        plain = inspect.signature(graph_class.capture_begin)
        watchers = captures.install(graph_class)
        wrapped = graph_class.capture_begin
        assert captures.install(graph_class) is watchers
        assert graph_class.capture_begin is wrapped
        assert inspect.signature(wrapped) == plain
        assert wrapped.__doc__ == "Begins."

    def test_watchers_are_told_before_after_and_at_the_end_also_of_a_failure(self) -> None:
        graph_class: Any = self.make()
        watcher = _Recorder()
        captures.install(graph_class).add(watcher)
        graph = graph_class()
        graph.capture_begin(capture_error_mode="relaxed")
        graph.capture_end()
        graph.calls.append("fail")
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="invalidated"):
            graph.capture_end()
        assert watcher.seen == ["beginning", "began", "ended", "beginning", "began", "ended failed"]

    def test_a_capture_its_watcher_refuses_is_ended(self) -> None:
        graph_class: Any = self.make()
        watcher = _Recorder(refuse=True)
        captures.install(graph_class).add(watcher)
        graph = graph_class()
        with pytest.raises(ValueError, match="refused"):
            graph.capture_begin()
        assert graph.calls == ["begin", "end"]
        assert watcher.seen == ["beginning", "ended failed"]

    def test_a_dropped_watcher_is_not_told(self) -> None:
        graph_class: Any = self.make()
        watchers = captures.install(graph_class)
        watchers.add(_Recorder())
        gc.collect()
        assert not list(watchers)
        graph_class().capture_begin()


class _Recorder:
    def __init__(self, refuse: bool = False) -> None:
        self.seen: list[str] = []
        self.refuse = refuse

    def beginning(self) -> object:
        self.seen.append("beginning")
        return 1

    def began(self, graph: Any, token: Any) -> None:
        if self.refuse:
            raise ValueError("refused")
        self.seen.append("began")

    def ended(self, graph: Any, failed: bool) -> None:
        self.seen.append("ended failed" if failed else "ended")


def test_a_release_calls_back_once_and_only_after_the_destructor_ran() -> None:
    lib: Any = Retaining()
    watched = releases.Releases(lib)
    called: list[str] = []
    first, second = watched.watch(1), watched.watch(2)
    first.callbacks.append(lambda: called.append("first"))
    second.callbacks.append(lambda: called.append("second"))
    watched.poll()
    assert called == []
    lib.destructors[1]()
    watched.poll()
    watched.poll()
    assert called == ["second"]
    assert second.over and not first.over


class TestTensors:
    """Tensors over bytes of a buffer, on the CPU: the code is the same."""

    def test_the_bytes_come_back_when_the_last_view_dies(self) -> None:
        made, buffer = _memory()
        deaths: list[int] = []
        tensor = made.tensor(buffer, 256, (4, 8), torch.float32, lambda: deaths.append(1))
        assert tensor.data_ptr() == buffer.address + 256
        assert tensor.untyped_storage().nbytes() == 4 * 8 * 4
        view = tensor[1:].view(-1)
        del tensor
        gc.collect()
        assert deaths == []
        del view
        gc.collect()
        assert deaths == [1]

    def test_the_buffer_lives_as_long_as_the_storage(self) -> None:
        made, buffer = _memory()
        tensor = made.tensor(buffer, 0, (16,), torch.uint8, None)
        tensor.fill_(9)
        del buffer
        gc.collect()
        assert tensor.sum().item() == 9 * 16

    def test_a_tensor_made_in_inference_mode_is_an_ordinary_one(self) -> None:
        made, buffer = _memory()
        with torch.inference_mode():
            assert not made.tensor(buffer, 0, (4,), torch.float32, None).is_inference()

    def test_bytes_are_read_where_they_lie(self) -> None:
        made, buffer = _memory()
        made._lib = SimpleNamespace(relaxed=contextlib.nullcontext)  # type: ignore[assignment]
        made.tensor(buffer, 0, (1024,), torch.uint8, None)[10:12] = 7
        assert made.read(buffer, 9, 4) == bytes([0, 7, 7, 0])
        assert made.read(buffer, 9, 0) == b""

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 5), (2, 3, 4)])
    def test_shapes_and_strides_are_those_of_torch(self, shape: tuple[int, ...]) -> None:
        made, buffer = _memory()
        tensor = made.tensor(buffer, 0, shape, torch.bfloat16, None)
        assert (tensor.shape, tensor.stride()) == (shape, torch.empty(shape).stride())

    @pytest.mark.parametrize(("offset", "shape"), [(-4, (1,)), (1024, (1,)), (0, (257,)), (2, (1,))])
    def test_bytes_outside_the_buffer_or_misaligned_are_refused(self, offset: int, shape: tuple[int, ...]) -> None:
        made, buffer = _memory()
        with pytest.raises(SizeError, match="does not fit"):
            made.tensor(buffer, offset, shape, torch.float32, None)


@pytest.mark.parametrize(
    ("backend", "capturing", "refused"),
    [("cudaMallocAsync", True, True), ("cudaMallocAsync", False, False), ("native", True, False)],
)
def test_trim_is_refused_only_where_it_would_break_a_capture(
    monkeypatch: pytest.MonkeyPatch, backend: str, capturing: bool, refused: bool
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: trimmed.append(1))
    lib: Any = SimpleNamespace(relaxed=contextlib.nullcontext)
    made = memory.Memory(lib, lib, torch.device("cpu"))
    if refused:
        with pytest.raises(CaptureError, match="while a capture is open"):
            made.trim(capturing)
    else:
        made.trim(capturing)
    assert bool(trimmed) is not refused


def _memory() -> tuple[memory.Memory, memory.DeviceBuffer]:
    nothing: Any = None
    return (
        memory.Memory(nothing, nothing, torch.device("cpu")),
        memory.DeviceBuffer(torch.zeros(1024, dtype=torch.uint8)),
    )
