"""Captures on one device: begin, end, abort, and what torch leaves undone when one fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workspace.cuda.captures import install
from workspace.cuda.graph import CapturedGraph
from workspace.cuda.libcuda import BROKEN, STICKY, LibCuda
from workspace.cuda.memory import torch_failure
from workspace.cuda.releases import Release, Releases
from workspace.cuda.streams import Streams
from workspace.errors import CaptureBroken, CaptureError, WorkspaceError


class _Own:
    """A capture this library began; not `kept` when it was aborted."""

    __slots__ = ("finished", "graph", "kept", "pool")

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        self.graph = graph
        self.pool = pool
        self.kept = True
        self.finished: CapturedGraph | None = None


class _Open:
    """A capture in progress, of this library's or another's making."""

    __slots__ = ("capture", "graph", "key", "release")

    def __init__(self, key: int, capture: int, graph: weakref.ref[Any], release: Release) -> None:
        self.key = key
        self.capture = capture
        self.graph = graph
        self.release = release


class Graphs:
    """Captures and graphs on one device; watches every capture torch begins on it.

    Attributes
    ----------
    current
        The driver's `current_stream`.
    alone
        The process sees no other device.
    """

    def __init__(self, lib: LibCuda, streams: Streams, index: int, current: Callable[[], int], alone: bool) -> None:
        self._lib = lib
        self._streams = streams
        self._index = index
        self.current = current
        self.alone = alone
        self._handles = streams.handles
        self._is_capturing = lib.cuStreamIsCapturing
        self._own: dict[int, _Own] = {}
        self._begun: dict[int, _Own] = {}
        self._open: dict[int, _Open] = {}
        self._callbacks: list[tuple[Callable[..., None], Callable[..., None], Callable[..., None]]] = []
        self.releases = Releases(lib)
        self._postponed: list[Callable[[], None]] = []
        self._watchers = install(torch.cuda.CUDAGraph)
        self._watchers.add(self)

    @property
    def capturing(self) -> bool:
        """Whether a capture that torch began is open on any stream of any watched device."""
        return any(graphs._open for graphs in list(self._watchers))

    def capture_of(self, stream: int) -> int:
        # The legacy default stream cannot capture, and asking it can fail while another stream does.
        if stream == 0:
            return 0
        handle = self._handles.get(stream) or self._streams.handle(stream)
        status, address = self._lib.out.status
        code = self._is_capturing(handle, address)
        if code:
            self._lib.check(code, "cuStreamIsCapturing", stream=stream)
        if not status.value:
            return 0
        return self._identity(stream, handle)

    def _identity(self, stream: int, handle: int) -> int:
        code, identity, _ = self._lib.capture_info(handle)
        self._lib.check(code, "cuStreamGetCaptureInfo", stream=stream)
        if identity:
            return identity
        # CUDA forgets the identity of a capture that broke, but what was lent in it has to be taken back.
        for opened in list(self._open.values()):
            if opened.key == stream or self._lib.capture_status(self._streams.handle(opened.key))[1] == BROKEN:
                return opened.capture
        raise CaptureBroken(
            f"stream {stream} is part of a broken capture that torch did not begin", "end that capture first"
        )

    # -- this library's captures ---------------------------------------------------------------------------
    def begin(self, stream: int, share: CapturedGraph | None, mode: str) -> int:
        if stream == 0:
            raise CaptureError(
                "the default stream cannot be captured",
                "make another stream current: with ws.on(ws.stream('main'))",
            )
        shared = share.raw if share is not None else None
        # A pool of known identity, because a failed capture has to be taken out of torch's allocator by hand.
        pool = shared.pool() if shared is not None else torch.cuda.graph_pool_handle()
        own = _Own(torch.cuda.CUDAGraph(), pool)
        self._own[id(own.graph)] = own
        # torch allocates and instantiates meanwhile: this thread may have another capture open on another stream.
        with self.on(stream), self._lib.relaxed():
            try:
                own.graph.capture_begin(pool=own.pool, capture_error_mode=mode)
            except BaseException as error:
                del self._own[id(own.graph)]
                if isinstance(error, WorkspaceError) or not isinstance(error, RuntimeError):
                    raise
                self._forget(own.pool)
                raise _capture_failure(error, "could not begin", stream) from error
        self._begun[stream] = own
        return self._open[id(own.graph)].capture

    def end(self, stream: int) -> CapturedGraph:
        own = self._taken(stream)
        self._end(own, stream)
        if own.finished is None:
            raise CaptureError(f"the capture on stream {stream} left no graph", "capture it again", stream=stream)
        return own.finished

    def abort(self, stream: int) -> None:
        own = self._taken(stream)
        own.kept = False
        try:
            self._end(own, stream)
        except CaptureError:  # expected of a broken capture: the caller holds the error that broke it
            pass
        self.destroy(own.graph.reset)

    def destroy(self, reset: Callable[[], None]) -> None:
        """Destroy a graph, once no capture is open: CUDA waits for the device then, which would break it."""
        self._postponed.append(reset)
        self.destroy_postponed()

    def destroy_postponed(self) -> None:
        """What was to be destroyed while a capture was open on any device."""
        if self.capturing:
            return
        for graphs in list(self._watchers):
            while graphs._postponed:
                try:
                    reset = graphs._postponed.pop()
                except IndexError:
                    break  # another thread took the last one meanwhile
                with self._lib.relaxed():  # a capture that torch did not begin is not seen here
                    reset()

    def _taken(self, stream: int) -> _Own:
        own = self._begun.pop(stream, None)
        if own is None:
            raise CaptureError(f"no capture was begun on stream {stream}", "begin one first", stream=stream)
        return own

    def _end(self, own: _Own, stream: int) -> None:
        with self.on(stream), self._lib.relaxed():
            try:
                own.graph.capture_end()
            except WorkspaceError:
                raise
            except RuntimeError as error:
                raise _capture_failure(error, "is invalid", stream) from error

    def _forget(self, pool: Any) -> None:
        """Close the allocator's side of a capture that failed, which torch 2.11 leaves open.

        Left open, the allocator believes in a capture for good and looks at no event any more: bytes freed after a
        recorded use on another stream never come back.
        """
        try:
            torch._C._cuda_endAllocateToPool(self._index, pool)
        except RuntimeError as error:
            if "not currently recording" not in str(error):
                raise torch_failure(error, "endAllocateToPool", pool=pool) from error
            return
        torch._C._cuda_releasePool(self._index, pool)

    def is_current(self, stream: int) -> bool:
        """Whether the device and the stream are the calling thread's current ones."""
        return self.current() == stream and (self.alone or torch._C._cuda_getDevice() == self._index)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Make a stream and its device current, and what was current before, afterwards."""
        device = torch._C._cuda_getDevice()
        wanted = self._streams.torch_id(stream)
        before = torch._C._cuda_getCurrentStream(self._index)[0]
        torch._C._cuda_setStream(stream_id=wanted, device_index=self._index, device_type=1)
        try:
            yield
        finally:
            torch._C._cuda_setStream(stream_id=before, device_index=self._index, device_type=1)
            if device != self._index:
                torch._C._cuda_setDevice(device)

    # -- every capture -------------------------------------------------------------------------------------
    def watch(self, beginning: Callable[..., None], began: Callable[..., None], ended: Callable[..., None]) -> None:
        self._callbacks.append((beginning, began, ended))

    def beginning(self) -> int | None:
        """Key of the stream about to capture, None when another device is current. Called by `captures`."""
        if torch._C._cuda_getDevice() != self._index:
            return None
        key = self._streams.of_torch_id(torch._C._cuda_getCurrentStream(self._index)[0])
        for beginning, _, _ in self._callbacks:
            beginning(key)
        return key

    def began(self, graph: Any, token: int) -> None:
        code, capture, captured = self._lib.capture_info(self._streams.handle(token))
        self._lib.check(code, "cuStreamGetCaptureInfo", stream=token)
        name = id(graph)
        release = self.releases.watch(captured)

        def collected(_: Any) -> None:
            release.ending = True
            self._open.pop(name, None)  # one collected before its capture ended must not leave it open for good

        release.graph = weakref.ref(graph, collected)
        self._open[name] = _Open(token, capture, release.graph, release)
        for _, began, _ in self._callbacks:
            began(token, capture)

    def ended(self, graph: Any, failed: bool) -> None:
        opened = self._open.pop(id(graph), None)
        if opened is None:  # a capture of another device, or one begun before this driver existed
            return
        own = self._own.pop(id(graph), None)
        finished = None
        if failed and own is not None:
            self._forget(own.pool)
        elif not failed and (own is None or own.kept):
            raw = _strong(graph) if own is not None else opened.graph
            finished = CapturedGraph(self, opened.capture, opened.release, raw, kept=own is not None)
        if own is not None:
            own.finished = finished
        for _, _, ended in self._callbacks:
            ended(opened.key, opened.capture, finished)
        self.destroy_postponed()


def _strong(graph: Any) -> Callable[[], Any]:
    return lambda: graph


def _capture_failure(error: RuntimeError, what: str, stream: int) -> WorkspaceError:
    if getattr(error, "error_code", 0) in STICKY:
        return torch_failure(error, "capture", stream=stream)
    first_line = str(error).splitlines()[0]
    return CaptureError(
        f"the capture on stream {stream} {what}: {first_line}",
        "capture only enqueued work: no synchronisation, and every forked stream joined before the end",
        stream=stream,
    )
