"""When the resources of a captured graph are gone: learnt from a user object the graph retains.

CUDA calls a user object's destructor once graph, executable and launches in flight are gone, from a thread of
its own that must not wait for anything. A Python destructor would wait for the interpreter's lock, and would
crash a process that is exiting. So libc's ``sem_post`` is the destructor, and the library polls semaphores.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from workspace.cuda.libcuda import GRAPH_USER_OBJECT_MOVE, USER_OBJECT_NO_DESTRUCTOR_SYNC, LibCuda

MOMENTS = 10.0
"""Seconds after which CUDA is not believed to post a semaphore any more."""

_SEMAPHORE_BYTES = 64  # sizeof(sem_t) is 32 on 64-bit glibc and musl

_libc = ctypes.CDLL(None)
_libc.malloc.argtypes, _libc.malloc.restype = [c_size_t], c_void_p
_libc.sem_init.argtypes = [c_void_p, c_int, c_uint]
_libc.sem_trywait.argtypes = [c_void_p]
_POST = ctypes.cast(_libc.sem_post, c_void_p).value

_spare: list[int] = []


class Release:
    """One graph's end, and whom to tell of it.

    Attributes
    ----------
    graph
        torch's graph, kept weakly.
    ending
        It was reset or collected: its end is under way.

    The semaphore lives in memory from malloc that is reused but never freed: CUDA may post it at any time,
    also while the process exits.
    """

    __slots__ = ("_semaphore", "callbacks", "ending", "graph", "over")

    def __init__(self) -> None:
        self._semaphore: int = _spare.pop() if _spare else _libc.malloc(_SEMAPHORE_BYTES)
        _libc.sem_init(self._semaphore, 0, 0)
        self.callbacks: list[Callable[[], None]] = []
        self.graph: weakref.ref[Any] | None = None
        self.ending = False
        self.over = False

    def attach(self, lib: LibCuda, graph: int) -> None:
        """Have a ``CUgraph`` (also one still being captured) retain the object that posts the semaphore."""
        made = c_void_p()
        flags = USER_OBJECT_NO_DESTRUCTOR_SYNC
        code = lib.cuUserObjectCreate(byref(made), self._semaphore, _POST, 1, flags)
        lib.check(code, "cuUserObjectCreate")
        code = lib.cuGraphRetainUserObject(graph, made, 1, GRAPH_USER_OBJECT_MOVE)
        lib.check(code, "cuGraphRetainUserObject", graph=hex(graph))

    def poll(self) -> bool:
        """Whether the graph is gone; calls the callbacks the first time it is."""
        if not self.over and _libc.sem_trywait(self._semaphore) == 0:
            self.over = True
            _spare.append(self._semaphore)
            callbacks, self.callbacks = self.callbacks, []
            for callback in callbacks:
                callback()
        return self.over


class Releases:
    """The graphs of one device whose end has not been seen yet."""

    def __init__(self, lib: LibCuda) -> None:
        self._lib = lib
        self._waiting: list[Release] = []

    def watch(self, graph: int) -> Release:
        release = Release()
        release.attach(self._lib, graph)
        self._waiting.append(release)
        return release

    @property
    def ending(self) -> bool:
        """Whether the end of a graph is under way and has not been seen."""
        return any(release.ending for release in self._waiting)

    def settle(self) -> None:
        """Wait until the graphs whose end is under way are gone, on an idle device: a matter of moments."""
        until = time.monotonic() + MOMENTS
        self.poll()
        while self.ending and time.monotonic() < until:
            time.sleep(0.0005)
            self.poll()

    def poll(self) -> None:
        """Call back for every graph that has gone since the last time."""
        if self._waiting:
            waiting = list(self._waiting)
            gone = {id(release) for release in waiting if release.poll()}
            self._waiting = [release for release in self._waiting if id(release) not in gone]
