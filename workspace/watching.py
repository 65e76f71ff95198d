"""Which device watches the calling thread: it is told of each workspace that is not its own.

Inside ``with device:`` a simulated device judges the thread's operations by its own streams and edges. To it, work on
the streams of another device's workspace is all on one stream, and a lease there is memory that nobody lends: a race
would be judged in order. Leases tell by themselves; streams, edges, captures and replays are told of by the simulated
device whose they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
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
_watched = False
"""Whether some thread has entered a device: nobody else looks at what its thread has entered."""


def enter(device: Watcher) -> None:
    """The calling thread's operations go to the device from now on."""
    _entered.devices.append(device)


def leave() -> None:
    """They go to the device entered before, if any."""
    _entered.devices.pop()


def watch(some: bool) -> None:
    """Some thread has entered a device, or none is in one any more."""
    global _watched
    _watched = some


def watched() -> bool:
    """Whether some thread has entered a device."""
    return _watched


REMEDY = "create it with device=device, the one that is entered"
COVERED = (
    "was used inside another device, which was entered within this one and got its operations: leave that one first"
)


def tell(workspace: Workspace) -> None:
    """A workspace lends to this thread: the verdict of a device that watches, and is not its own, cannot be SAFE."""
    if not _watched:
        return
    for device, own in _deceived(lambda one: one.judges(workspace.driver)):
        name = f"workspace {workspace.name or 'root'!r} ({workspace.strategy})"
        device.unknown(
            f"{name} {COVERED}"
            if own
            else f"{name} is of another device, {workspace.device}, whose streams, forks and leases this one does not "
            f"see: {REMEDY}"
        )


def use(device: object) -> None:
    """Streams of a device are used by this thread; likewise."""
    if not _watched:
        return
    for one, own in _deceived(lambda one: one is device):
        one.unknown(
            f"a workspace of its own {COVERED}"
            if own
            else "a workspace of another device was used on its streams (an edge, a current stream, a capture, a "
            f"replay or an upload), which this one does not see: {REMEDY}"
        )


def _deceived(owns: Callable[[Watcher], bool]) -> Iterator[tuple[Watcher, bool]]:
    """The devices that the thread has entered, and whether each owns what is used; none where the innermost does.

    That one judges it. Else its operations go where its streams are not known, and the owner, too, sees one without the
    other.
    """
    devices = _entered.devices
    if devices and not owns(devices[-1]):
        for device in dict.fromkeys(devices):
            yield device, owns(device)
