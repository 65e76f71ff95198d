"""Which threads the executor sees: those that entered the device. Others are refused its memory.

A thread does not inherit its parent's modes. One that forgot to enter would run operators at once, on bytes that queued
nodes have yet to write, and nothing would show it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode

from workspace.errors import DeviceError
from workspace.simulated.dispatch import Dispatch
from workspace.simulated.host_reads import HostReads, escape
from workspace.simulated.shapes import map_tensors

if TYPE_CHECKING:
    from workspace.simulated.executor import Executor


class Stranger(TorchDispatchMode):
    """The mode of a thread started while a device is entered: operators on that device's memory are refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            map_tensors([list(args), list(kwargs.values())], self._check)
        return func(*args, **kwargs)

    def _check(self, tensor: Any) -> None:
        if owner(tensor) is not None:
            name = threading.current_thread().name
            raise DeviceError(
                f"thread {name!r} used memory of a simulated device it did not enter",
                "enter it in the thread too (`with device:`), so that its operators are queued and ordered",
                thread=name,
            )


class Presence:
    """The modes of each thread that entered a device.

    Parameters
    ----------
    executor
        Gets the operators of those threads.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._local = threading.local()

    def enter(self) -> None:
        """Begin to queue the calling thread's operators; may nest."""
        modes = Dispatch(self._executor), HostReads(self._executor)
        _watch(self._executor)
        for mode in modes:
            mode.__enter__()
        self._stack().append(modes)

    def exit(self) -> None:
        """End it, and run what is pending. This orders nothing: only a synchronisation does."""
        for mode in reversed(self._stack().pop()):
            mode.__exit__(None, None, None)
        _unwatch(self._executor)
        if self._executor.device.queue.fault is None:
            self._executor.device.drain()

    def inside(self) -> bool:
        """Whether the calling thread entered."""
        return bool(self._stack())

    def _stack(self) -> list[Any]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack


_entered: list[Executor] = []
_lock = threading.Lock()
_start = threading.Thread.start
_to_dlpack = torch.utils.dlpack.to_dlpack


def owner(tensor: Any) -> Executor | None:
    """The executor, among those entered anywhere, whose device a tensor's bytes belong to."""
    return next((executor for executor in list(_entered) if executor.owns(tensor)), None)


def _watch(executor: Executor) -> None:
    with _lock:
        _entered.append(executor)
        threading.Thread.start = _start_watched  # type: ignore[method-assign, assignment]
        torch.utils.dlpack.to_dlpack = torch.to_dlpack = _to_dlpack_watched  # type: ignore[assignment]


def _unwatch(executor: Executor) -> None:
    with _lock:
        _entered.remove(executor)
        if not _entered:
            threading.Thread.start = _start  # type: ignore[method-assign]
            torch.utils.dlpack.to_dlpack = torch.to_dlpack = _to_dlpack


def _start_watched(thread: threading.Thread) -> None:
    body = thread.run

    def run() -> None:
        with Stranger():
            body()

    thread.run = run  # type: ignore[method-assign]
    _start(thread)


def _to_dlpack_watched(tensor: Any) -> Any:
    """The one way to a tensor's bytes that no mode of torch sees."""
    if owner(tensor) is not None:
        raise escape("to_dlpack")
    return _to_dlpack(tensor)
