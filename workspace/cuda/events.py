"""Events and order: record, wait, query, synchronise, on handles."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_void_p
from typing import Any

from workspace.cuda.libcuda import EVENT_DISABLE_TIMING, INVALID_CONTEXT, NOT_READY, LibCuda
from workspace.cuda.streams import Streams


class Events:
    """Event verbs on one device.

    The hot verbs read a handle from a dict and make one call. A thread that never used CUDA has no current
    context, and the default stream means the one of the current device: both take the slow path.

    Parameters
    ----------
    several
        Whether the process sees more than one device, so that the current one may be another.
    """

    def __init__(self, lib: LibCuda, streams: Streams, context: int, several: bool) -> None:
        self._lib = lib
        self._streams = streams
        self._handles = streams.handles
        self._context = context
        self._several = several
        self._record = lib.cuEventRecord
        self._wait = lib.cuStreamWaitEvent
        self._query = lib.cuEventQuery
        self._memset = lib.cuMemsetD8Async

    def new(self) -> int:
        made = c_void_p()
        create = self._lib.cuEventCreate
        code = INVALID_CONTEXT if self._several else create(byref(made), EVENT_DISABLE_TIMING)
        if code:
            code = self._in_context(code, create, byref(made), EVENT_DISABLE_TIMING)
            self._lib.check(code, "cuEventCreate")
        return made.value or 0

    def free(self, event: int) -> None:
        self._check(self._lib.cuEventDestroy_v2, "cuEventDestroy", event=event)

    def record(self, event: int, stream: int) -> None:
        handle = self._handles.get(stream)
        if handle is None or (self._several and not handle):
            self._check(self._record, "cuEventRecord", event=event, stream=self._streams.live_handle(stream))
            return
        code = self._record(event, handle)
        if code:
            self._again(code, self._record, "cuEventRecord", event=event, stream=handle)

    def wait(self, event: int, stream: int) -> None:
        handle = self._handles.get(stream)
        if handle is None or (self._several and not handle):
            handle = self._streams.live_handle(stream)
            self._check(self._wait, "cuStreamWaitEvent", stream=handle, event=event, flags=0)
            return
        code = self._wait(handle, event, 0)
        if code:
            self._again(code, self._wait, "cuStreamWaitEvent", stream=handle, event=event, flags=0)

    def done(self, event: int) -> bool:
        code = self._lib.relaxed_call(self._query, event)
        if code == NOT_READY:
            return False
        if code:
            self._again(code, self._query, "cuEventQuery", event=event)
        return True

    def synchronize_event(self, event: int) -> None:
        with self._lib.relaxed():
            self._check(self._lib.cuEventSynchronize, "cuEventSynchronize", event=event)

    def synchronize_stream(self, stream: int) -> None:
        with self._lib.relaxed():
            handle = self._streams.live_handle(stream)
            self._check(self._lib.cuStreamSynchronize, "cuStreamSynchronize", stream=handle)

    def synchronize_device(self) -> None:
        with self._lib.current(self._context):
            self._lib.check(self._lib.cuCtxSynchronize(), "cuCtxSynchronize")

    def synchronize_streams_outside_captures(self) -> None:
        """Every stream that is never destroyed and does not capture.

        Synchronising the device breaks any capture in progress on it, whatever the thread's capture mode.
        """
        for stream, handle in list(self._handles.items()):
            code, capturing = self._lib.capture_status(handle) if handle else (0, 0)
            self._lib.check(code, "cuStreamIsCapturing", stream=hex(handle))
            if not capturing:
                self.synchronize_stream(stream)

    def memset(self, address: int, nbytes: int, value: int, stream: int) -> None:
        handle = self._streams.live_handle(stream)
        if self._several and not handle:
            code = INVALID_CONTEXT
        else:
            code = self._memset(address, value, nbytes, handle)
        if code:
            arguments = {"address": address, "value": value, "nbytes": nbytes, "stream": handle}
            self._again(code, self._memset, "cuMemsetD8Async", **arguments)

    def _check(self, function: Callable[..., int], verb: str, **arguments: int) -> None:
        """Call in the device's context where it matters, else as the thread is, and raise what fails."""
        if self._several and arguments.get("stream") == 0:
            self._again(INVALID_CONTEXT, function, verb, **arguments)
        else:
            code = function(*arguments.values())
            if code:
                self._again(code, function, verb, **arguments)

    def _again(self, code: int, function: Callable[..., int], verb: str, **arguments: int) -> None:
        """Repeat within the device's context a call that failed for want of one; raise what remains."""
        code = self._in_context(code, function, *arguments.values())
        self._lib.check(code, verb, **{name: hex(value) for name, value in arguments.items()})

    def _in_context(self, code: int, function: Callable[..., int], *arguments: Any) -> int:
        if code != INVALID_CONTEXT:
            return code
        with self._lib.current(self._context):
            return function(*arguments)
