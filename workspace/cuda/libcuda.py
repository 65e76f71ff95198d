"""The verbs of libcuda this library calls, by ctypes: no build step, less host time than torch's methods."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, addressof, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from workspace.errors import CaptureBroken, DriverError, Unsupported

NOT_READY = 600
INVALID_CONTEXT = 201
"""The calling thread has no current context: it never used CUDA before."""

CAPTURE_ERRORS = range(900, 910)
"""cudaErrorStreamCapture*: the call was refused because of a capture, which most of them also invalidate."""

STICKY = frozenset({214, 220, 221, 700, 702, 710, 714, 715, 716, 717, 718, 719, 720, 721, 999})
"""Codes after which the context refuses all work (cuda.h: "leaves the process in an inconsistent state")."""

EVENT_DISABLE_TIMING = 2
STREAM_NON_BLOCKING = 1
CAPTURE_RELAXED = 2
BROKEN = 2
"""Status of a stream whose capture was invalidated and has not been ended."""
USER_OBJECT_NO_DESTRUCTOR_SYNC = 1
GRAPH_USER_OBJECT_MOVE = 1

LEGACY_STREAM, PER_THREAD_STREAM = 1, 2
"""Handles cuda.h reserves; 0 also means the legacy default stream."""

_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuCtxSynchronize": [],
    "cuThreadExchangeStreamCaptureMode": [c_void_p],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamGetId": [c_void_p, POINTER(c_uint64)],
    "cuStreamGetCtx": [c_void_p, POINTER(c_void_p)],
    "cuStreamIsCapturing": [c_void_p, c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamBeginCapture_v2": [c_void_p, c_int],
    "cuStreamEndCapture": [c_void_p, POINTER(c_void_p)],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventCreate": [POINTER(c_void_p), c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuMemsetD8Async": [c_uint64, c_ubyte, c_size_t, c_void_p],
    "cuUserObjectCreate": [POINTER(c_void_p), c_void_p, c_void_p, c_uint, c_uint],
    "cuGraphRetainUserObject": [c_void_p, c_void_p, c_uint, c_uint],
    "cuGraphDestroy": [c_void_p],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}

_CAPTURE_INFO = {  # The same call under the name of each era: CUDA 12.3 added edge data before the count.
    "cuStreamGetCaptureInfo_v2": 6,
    "cuStreamGetCaptureInfo_v3": 7,
}


class _Out(threading.local):
    """Each thread's own places for results, with their addresses: making them anew, or passing them by reference,
    costs more than the calls of the hot path.
    """

    def __init__(self) -> None:
        mode, status = c_int(CAPTURE_RELAXED), c_int(0)
        self.mode = mode, addressof(mode)
        self.status = status, addressof(status)


class LibCuda:
    """The driver's functions as attributes, each returning its result code, and the text of its errors.

    Raises `Unsupported` when libcuda is not installed, has no device, or lacks a function.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as missing:
            raise Unsupported(
                f"the CUDA driver library could not be loaded: {missing}",
                "install the NVIDIA driver, or use device='cpu'",
            ) from missing
        for name, arguments in _SIGNATURES.items():
            setattr(self, name, self._function(name, arguments))
        self.capture_info_function, self._capture_info_length = self._find_capture_info()
        self.out = _Out()
        code = self.cuInit(0)
        if code:
            raise Unsupported(
                f"the CUDA driver did not start: {self.text(code)}",
                "check that a device is visible (CUDA_VISIBLE_DEVICES, nvidia-smi), or use device='cpu'",
                code=code,
            )

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"{name} is not among the functions of libcuda this library calls")

    def _function(self, name: str, arguments: list[Any]) -> Callable[..., int]:
        try:
            function = getattr(self._library, name)
        except AttributeError as missing:
            raise Unsupported(
                f"this CUDA driver has no {name}", "use a driver of CUDA 12.0 or later", function=name
            ) from missing
        function.argtypes = arguments
        function.restype = c_int
        return function

    def _find_capture_info(self) -> tuple[Callable[..., int], int]:
        for name, length in _CAPTURE_INFO.items():
            if hasattr(self._library, name):
                return self._function(name, [c_void_p] * length), length
        names = " nor ".join(_CAPTURE_INFO)
        raise Unsupported(f"this CUDA driver has neither {names}", "use a driver of CUDA 12.0 or later")

    def capture_status(self, stream: int) -> tuple[int, int]:
        """Code, and 0: the stream is not capturing, 1: it is, 2: it is and the capture is broken."""
        status, address = self.out.status
        code = self.cuStreamIsCapturing(stream, address)
        return code, status.value

    def relaxed_call(self, function: Callable[[int], int], argument: int) -> int:
        """`relaxed` around one call, without the price of a context manager."""
        mode, address = self.out.mode
        mode.value = CAPTURE_RELAXED
        exchange = self.cuThreadExchangeStreamCaptureMode
        exchange(address)
        try:
            return function(argument)
        finally:
            exchange(address)

    def capture_info(self, stream: int) -> tuple[int, int, int]:
        """Code, identity (0: not capturing) and ``CUgraph`` of the capture a stream is part of."""
        status, identity, graph = c_int(0), c_uint64(0), c_void_p(None)
        rest = [None] * (self._capture_info_length - 4)
        code = self.capture_info_function(stream, byref(status), byref(identity), byref(graph), *rest)
        return code, identity.value if status.value else 0, graph.value or 0

    def text(self, code: int) -> str:
        """Name, number and sentence of a result code."""
        name, sentence = c_char_p(), c_char_p()
        self.cuGetErrorName(code, byref(name))
        self.cuGetErrorString(code, byref(sentence))
        return f"{_decoded(name) or 'unknown error'} ({code}): {_decoded(sentence) or 'no description'}"

    def check(self, code: int, verb: str, **values: object) -> None:
        """Raise the typed error of a failing call. ``values`` are the arguments worth naming."""
        if code:
            raise failure(self.text(code), code, verb, **values)

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread make calls that would otherwise break a capture on another stream or thread."""
        mode = c_int(CAPTURE_RELAXED)
        self.check(self.cuThreadExchangeStreamCaptureMode(byref(mode)), "cuThreadExchangeStreamCaptureMode")
        try:
            yield
        finally:
            self.cuThreadExchangeStreamCaptureMode(byref(mode))

    @contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Make a context current, and the thread's own current again afterwards (also if it had none)."""
        self.check(self.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent", context=hex(context))
        try:
            yield
        finally:
            self.cuCtxPopCurrent_v2(byref(c_void_p()))


def failure(text: str, code: int, verb: str, **values: object) -> DriverError | CaptureBroken:
    """The error of a failing driver call: says which call, on what, and whether the process can go on."""
    arguments = ", ".join(f"{name}={value}" for name, value in values.items())
    problem = f"{verb}({arguments}) failed: {text}"
    sticky = code in STICKY
    if code in CAPTURE_ERRORS:
        remedy = "do it before the capture begins or after it has ended; the capture may be invalid now"
        return CaptureBroken(problem, remedy, code=code, verb=verb, sticky=False, **values)
    if sticky:
        remedy = (
            "an earlier kernel failed and the context is lost: start a new process; "
            "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer finds the kernel"
        )
    else:
        remedy = "check that the stream, event or memory named is alive and belongs to this device"
    return DriverError(problem, remedy, code=code, verb=verb, sticky=sticky, **values)


def _decoded(text: c_char_p) -> str:
    return text.value.decode() if text.value else ""
