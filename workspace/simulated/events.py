"""Events: the place a record named, and whether the device has got there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workspace.errors import DriverError
from workspace.simulated.node import Node
from workspace.simulated.order import Clock, Point

if TYPE_CHECKING:
    from workspace.simulated.capture import Capture


class Stamp(Point):
    """A place in a stream's order that the device reaches at some time.

    Attributes
    ----------
    tick
        Count of operations the host had enqueued on the device by then.
    node
        In deferred execution, the last node before the place (None: nothing was pending).
    """

    __slots__ = ("node", "tick")

    def __init__(self, stream: int, position: int, clock: Clock, tick: int, node: Node | None) -> None:
        self.stream = stream
        self.position = position
        self.clock = clock
        self.tick = tick
        self.node = node


class Event:
    """An event's most recent record: eager (`stamp`), inside a capture (`capture`, `ends`), or none."""

    __slots__ = ("capture", "ends", "point", "stamp")

    def __init__(self) -> None:
        self.stamp: Stamp | None = None
        self.capture: Capture | None = None
        self.point: Point | None = None
        self.ends: tuple[Node, ...] = ()


class EventTable(dict[int, Event]):
    """Events by handle. Handles of freed events are not used again."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 1

    def __missing__(self, handle: int) -> Event:
        raise DriverError(
            f"event {handle!r} does not exist (cudaErrorInvalidResourceHandle)",
            "use events from new_event() that were not freed",
            event=handle,
        )

    def add(self) -> int:
        handle = self._next
        self._next += 1
        self[handle] = Event()
        return handle

    def remove(self, handle: int) -> None:
        self[handle]  # an unknown handle is refused
        del self[handle]
