"""Which threads the executor sees: those that entered the device. Others are refused its memory.

A thread does not inherit its parent's modes. One that forgot to enter would run operators at once, on bytes that queued
nodes have yet to write, and nothing would show it. Threads started while a device is entered, and work given to thread
pools meanwhile, are watched; a thread of another kind that was running before cannot be.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import thread as pools
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)

from workspace import watching
from workspace.errors import DeviceError
from workspace.simulated.dispatch import Dispatch
from workspace.simulated.host_reads import HostReads, escape
from workspace.simulated.shapes import map_tensors

if TYPE_CHECKING:
    from workspace.simulated.executor import Executor


class Stranger(TorchDispatchMode):
    """The mode of a watched thread that did not enter: operators on a device's memory are refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            map_tensors([list(args), list(kwargs.values())], _refuse_owned)
        return func(*args, **kwargs)


class Presence:
    """The modes of each thread that entered a device.

    Parameters
    ----------
    executor
        Gets the operators of those threads.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def enter(self) -> None:
        """Begin to queue the calling thread's operators; may nest: then the device entered before gets none of them."""
        covered = isinstance(_get_current_dispatch_mode(), (Stranger, Dispatch)) and _pop_mode()
        modes = Dispatch(self._executor), HostReads(self._executor)
        for mode in modes:
            mode.__enter__()
        _stack().append((modes, covered))
        watching.enter(self._executor.device)
        _watch(self._executor)

    def exit(self) -> None:
        """End it, and run what is pending. This orders nothing: only a synchronisation does."""
        _unwatch(self._executor)
        modes, covered = _stack().pop()
        watching.leave()
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        if covered:
            _push_mode(covered)
        if self._executor.device.queue.fault is None:
            self._executor.device.drain()


_entered: list[tuple[threading.Thread, Executor]] = []
_lock = threading.Lock()
_local = threading.local()
_start = threading.Thread.start
_work = pools._WorkItem.run
_to_dlpack = torch.utils.dlpack.to_dlpack


def _forked() -> None:
    """Another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _stack() -> list[Any]:
    """What the calling thread has entered."""
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def _owned(tensor: Any) -> bool:
    return any(executor.owns(tensor) for _, executor in list(_entered))


def _refuse_owned(tensor: Any) -> None:
    if _owned(tensor):
        name = threading.current_thread().name
        raise DeviceError(
            f"thread {name!r} used memory of a simulated device it did not enter",
            "enter it in the thread too (`with device:`), so that its operators are queued and ordered",
            thread=name,
        )


def _watch(executor: Executor) -> None:
    with _lock:
        _entered.append((threading.current_thread(), executor))
        _install(_start_watched, _work_watched, _to_dlpack_watched)
        watching.watch(True)


def _unwatch(executor: Executor) -> None:
    with _lock:
        _entered.remove((threading.current_thread(), executor))
        _entered[:] = [entry for entry in _entered if entry[0].is_alive()]  # some end without leaving
        if not _entered:
            _install(_start, _work, _to_dlpack)
            watching.watch(False)


def _install(start: Any, work: Any, to_dlpack: Any) -> None:
    threading.Thread.start = start  # type: ignore[method-assign]
    pools._WorkItem.run = work  # type: ignore[method-assign]
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = to_dlpack


def _start_watched(thread: threading.Thread) -> None:
    body = thread.run

    def run() -> None:
        with Stranger():
            body()

    thread.run = run  # type: ignore[method-assign]
    _start(thread)


def _work_watched(item: Any, *context: Any) -> None:
    if _stack():
        _work(item, *context)
        return
    with Stranger():
        _work(item, *context)


def _to_dlpack_watched(tensor: Any) -> Any:
    """The one way to a tensor's bytes that no mode of torch sees."""
    if _owned(tensor):
        raise escape("to_dlpack")
    return _to_dlpack(tensor)
