"""Which device watches the calling thread: it is told of each workspace that is not its own.

Inside ``with device:`` a simulated device judges the thread's operations by its own streams and edges. To it, work on
the streams of another device's workspace is all on one stream, and a lease there is memory that nobody lends: a race
would be judged in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from workspace.workspace import Workspace


class Watcher(Protocol):
    """A device that judges what a thread does while it has entered it."""

    def judges(self, driver: object) -> bool:
        """Whether the driver is its own: what workspaces of it do is seen."""

    def unknown(self, reason: str) -> None:
        """The verdict can no longer be SAFE, for this reason."""


class _Entered(threading.local):
    def __init__(self) -> None:
        self.devices: list[Watcher] = []  # the innermost last: operations go to it


_entered = _Entered()
_listeners: list[Callable[[bool], None]] = []
_watched = False


def enter(device: Watcher) -> None:
    """The calling thread's operations go to the device from now on."""
    _entered.devices.append(device)


def leave() -> None:
    """They go to the device entered before, if any."""
    _entered.devices.pop()


def watch(some: bool) -> None:
    """Some thread has entered a device, or none is in one any more."""
    global _watched
    if some != _watched:
        _watched = some
        for listener in _listeners:
            listener(some)


def watched() -> bool:
    """Whether some thread has entered a device."""
    return _watched


def listen(listener: Callable[[bool], None]) -> None:
    """Call back when that changes."""
    _listeners.append(listener)


def tell(workspace: Workspace) -> None:
    """A workspace is used by this thread: where another device watches, its verdict can no longer be SAFE."""
    devices = _entered.devices
    if devices and not devices[-1].judges(workspace.driver):
        devices[-1].unknown(
            f"workspace {workspace.name or 'root'!r} ({workspace.strategy}) is of another device, {workspace.device}, "
            "whose streams, forks and leases this one does not see: create it with device=device, the one that is "
            "entered"
        )
