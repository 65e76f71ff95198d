"""Which integer names a stream, for as long as it exists.

torch's own stream ids are the keys of streams that are never destroyed: 0 for the default stream, odd numbers
for its pools, the handle itself for external streams (c10/cuda/CUDAStream.cpp, "StreamId assignment"). The
streams this library creates are external ones it never destroys, so their handle is their key, too. Any other
raw handle may be destroyed and its value reused, so its key is made from ``cuStreamGetId``, which never is.
"""

from __future__ import annotations

from ctypes import byref, c_uint64, c_void_p
from typing import Any

import torch

from workspace.cuda.libcuda import LEGACY_STREAM, PER_THREAD_STREAM, STREAM_NON_BLOCKING, LibCuda
from workspace.errors import StreamError

RAW = 1 << 62
"""Added to the id of a raw stream: above every address and every id of torch's."""

_LOWEST_HANDLE = 4096
_POOL_PRIORITIES = (0, -1, -2, -3)  # c10::cuda::max_compile_time_stream_priorities is 4


class Streams:
    """Streams of one device by key.

    Attributes
    ----------
    handles
        Handle of each stream that is never destroyed, by key. The hot paths read it.
    """

    def __init__(self, lib: LibCuda, index: int, context: int) -> None:
        self._lib = lib
        self._index = index
        self._context = context
        self.handles: dict[int, int] = {0: 0}
        self._keys: dict[int, int] = {0: 0, LEGACY_STREAM: 0}
        self._raw: dict[int, int] = {}
        self._raw_keys: dict[int, int] = {}
        self._objects: dict[int, torch.cuda.Stream] = {}
        for priority in _POOL_PRIORITIES:
            self._keep_pool(priority)

    def _keep_pool(self, priority: int) -> None:
        """Learn torch's pool of one priority by going round it once; torch fills it at the first stream."""
        while True:
            stream = torch.cuda.Stream(device=self._index, priority=priority)
            if stream.stream_id in self.handles:
                return
            self._keep(stream.stream_id, stream.cuda_stream)

    def _keep(self, key: int, handle: int) -> None:
        self.handles[key] = handle
        self._keys[handle] = key

    def create(self) -> int:
        """A stream of its own, never destroyed, never handed to anyone else (torch's pool would share it)."""
        made = c_void_p()
        with self._lib.relaxed(), self._lib.current(self._context):
            self._lib.check(self._lib.cuStreamCreate(byref(made), STREAM_NON_BLOCKING), "cuStreamCreate")
        handle = made.value or 0
        self._keep(handle, handle)
        return handle

    @property
    def keys(self) -> dict[int, int]:
        """Key of each stream that is never destroyed, by handle."""
        return self._keys

    def owned(self, key: int) -> bool:
        return key in self.handles

    def handle(self, key: int) -> int:
        """Handle behind a key. The caller vouches that a raw stream is alive: CUDA crashes if it is not."""
        handle = self.handles.get(key)
        if handle is None:
            handle = self._raw.get(key)
        if handle is None:
            raise StreamError(
                f"stream key {key} is unknown, or its raw stream was destroyed and its handle reused",
                "pass the stream itself again, while it exists",
                key=key,
            )
        return handle

    def live_handle(self, key: int) -> int:
        """`handle`, after asking a raw stream whether its handle still names it."""
        handle = self.handles.get(key)
        if handle is None:
            self.identify(self.handle(key))
            handle = self.handle(key)
        return handle

    def key(self, stream: object) -> int:
        """Key of a stream object, handle or key; see `Driver.stream_key`."""
        if isinstance(stream, int):
            return self._of_integer(stream)
        if isinstance(stream, torch.Stream | torch.cuda.Stream):
            return self._of_torch(stream)
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is None:
            raise StreamError(
                f"{stream!r} of type {type(stream).__name__} names no CUDA stream",
                "pass ws.stream(name), a torch.cuda.Stream, an object with __cuda_stream__ or a raw handle; omit the "
                "argument for the caller's current stream",
            )
        return self.identify(int(protocol()[1]))

    def _of_integer(self, value: int) -> int:
        if value in self.handles or value in self._raw:
            return value
        if value >= RAW:
            self.handle(value)
        if value not in (LEGACY_STREAM, PER_THREAD_STREAM) and (value < _LOWEST_HANDLE or value % 8):
            raise StreamError(
                f"{value} is neither the key nor the handle of a stream",
                "pass the stream object, or its cuda_stream",
            )
        return self.identify(value)

    def _of_torch(self, stream: Any) -> int:
        device = stream.device
        if device.type != "cuda" or device.index != self._index:
            raise StreamError(
                f"{stream!r} is on {device}, this workspace is on cuda:{self._index}",
                "use a stream of the workspace's device, or one workspace for each device",
            )
        return self.of_torch_id(stream.stream_id)

    def of_torch_id(self, stream_id: int) -> int:
        """Key of a stream by torch's id for it."""
        if stream_id in self.handles:
            return stream_id
        if stream_id & 1:  # a pool stream that another thread drew while the pool was learnt
            found = torch.cuda.Stream(stream_id=stream_id, device_index=self._index, device_type=1)
            self._keep(stream_id, found.cuda_stream)
            return stream_id
        return self.identify(stream_id)

    def identify(self, handle: int) -> int:
        """Key of a live stream by its handle, asked anew each time unless the stream is never destroyed."""
        kept = self._keys.get(handle)
        if kept is not None:
            return kept
        if handle == PER_THREAD_STREAM:
            raise StreamError(
                "the per-thread default stream is another stream in each thread",
                "create a stream and pass that",
            )
        code, capturing = self._lib.capture_status(handle)
        self._check(code, "cuStreamIsCapturing", handle)
        if capturing:
            return self._capturing(handle)
        identity = c_uint64(0)
        self._check(self._lib.cuStreamGetId(handle, byref(identity)), "cuStreamGetId", handle)
        key = RAW | identity.value
        return key if key in self._raw else self._first_seen(handle, key)

    def _first_seen(self, handle: int, key: int) -> int:
        context = c_void_p()
        self._check(self._lib.cuStreamGetCtx(handle, byref(context)), "cuStreamGetCtx", handle)
        if context.value != self._context:
            raise StreamError(
                f"raw stream {handle:#x} belongs to another device or context than cuda:{self._index}",
                "use a stream of the workspace's device",
            )
        earlier = self._raw_keys.get(handle)
        if earlier is not None:  # destroyed, and its handle given to this stream
            del self._raw[earlier]
        self._raw_keys[handle] = key
        self._raw[key] = handle
        return key

    def _capturing(self, handle: int) -> int:
        # Asking a capturing stream for its id fails and breaks the capture. It cannot have been destroyed
        # since then: the last answer holds, unless the handle was reused before that, unseen.
        key = self._raw_keys.get(handle)
        if key is None:
            raise StreamError(
                f"raw stream {handle:#x} is capturing and was never seen before; it cannot be identified now",
                "use it with the library once before the capture, or capture on a torch.cuda.Stream",
            )
        return key

    def _check(self, code: int, verb: str, handle: int) -> None:
        self._lib.check(code, verb, stream=hex(handle))

    def torch_stream(self, key: int) -> torch.cuda.Stream:
        """torch's object for a stream, for the few calls that want one."""
        made = self._objects.get(key)
        if made is None:
            made = torch.cuda.Stream(stream_id=self.torch_id(key), device_index=self._index, device_type=1)
            if key in self.handles:
                self._objects[key] = made
        return made

    def torch_id(self, key: int) -> int:
        """torch's id of a stream: the key, or for raw streams the handle."""
        return key if key in self.handles else self.handle(key)
