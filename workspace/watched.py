"""The facade while some thread is inside ``with device:`` of a simulated device; see `workspace.watching`."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch

from workspace import watching
from workspace.capturing import GraphCapture
from workspace.event import WorkspaceEvent
from workspace.fork import Branch, Fork
from workspace.streams import Stream
from workspace.workspace import Workspace


class Watched(Workspace):
    """A workspace that tells the device that watches of what is no lease. A lease tells by itself.

    Every workspace is of this class while some thread has entered a device, and of its own class else: the steady path
    of a fork or a branch, which may be C++, is not to ask at each call.
    """

    __slots__ = ()

    def stream(self, name: str, *, communication: bool = False) -> Stream:
        watching.tell(self)
        return super().stream(name, communication=communication)

    def on(self, stream: object) -> Branch:
        watching.tell(self)
        return super().on(stream)

    def fork(self, *streams: Stream) -> Fork:
        watching.tell(self)
        return super().fork(*streams)

    def event(self) -> WorkspaceEvent:
        watching.tell(self)
        return super().event()

    def capture(self, lane: str | None = None) -> GraphCapture:
        watching.tell(self)
        return super().capture(lane)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, owner: str = "empty") -> Any:
        watching.tell(self)
        return super().empty(shape, dtype, owner=owner)


_everybody: weakref.WeakSet[Workspace] = weakref.WeakSet()
_lock = threading.Lock()


def watchable(workspace: Workspace) -> Workspace:
    """The workspace, which from now on follows whether a device is entered."""
    with _lock:
        _everybody.add(workspace)
        _change(workspace, watching.watched())
    return workspace


def _change(workspace: Workspace, some: bool) -> None:
    workspace.__class__ = Watched if some else Workspace


def _change_all(some: bool) -> None:
    with _lock:
        for workspace in _everybody:
            _change(workspace, some)


def _forked() -> None:
    """Another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


watching.listen(_change_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
