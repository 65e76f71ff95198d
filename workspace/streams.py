"""Streams and events as the framework keeps them: a device handle beside an id of the clocks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from workspace import clocks
from workspace.process import OfProcess

if TYPE_CHECKING:
    from workspace.capture import Capture
    from workspace.clocks import Clock


CURRENT = object()
"""The caller's current stream: what an omitted ``stream=`` means. An explicit None is a bug, and refused."""


class Event:
    """A device event and what its last record covers.

    The handle goes back to a queue when the last reference dies: a finaliser takes no lock and calls no device.
    """

    __slots__ = ("_spent", "covered", "epoch", "handle")

    def __init__(self, handle: int, spent: deque[int]) -> None:
        self.handle = handle
        self.epoch = 0
        self.covered = clocks.new_seen()
        self._spent = spent

    def __del__(self) -> None:
        self._spent.append(self.handle)


class Stream(OfProcess):
    """A stream the timeline knows. Made by ``ws.stream(name)``, or when a stream is first seen.

    Attributes
    ----------
    key
        The driver's key: names the stream for as long as it exists.
    name
        For reports.
    clock, id
        What the clocks know of it, and its id there. A stream that takes part in a capture has a second `Stream` with
        an id of its own there, because order inside a capture says nothing about order outside.
    communication
        Whether work on it may spin until another stream makes progress; a fence then never waits for more of it
        than the use needs.
    exact
        Whether uses on it are recorded at release: the handle may be destroyed, or the stream communicates.
    capture
        The capture this stream belongs to, None outside.
    last
        The event most recently recorded on it, which covers every use up to its epoch.
    """

    __slots__ = ("capture", "clock", "communication", "exact", "id", "key", "last", "name")

    def __init__(
        self, key: int, name: str, clock: Clock, *, communication: bool, exact: bool, capture: Capture | None = None
    ) -> None:
        self.key = key
        self.name = name
        self.clock = clock
        self.id = clock.id
        self.communication = communication
        self.exact = exact
        self.capture = capture
        self.last: Event | None = None

    def __copy__(self) -> Stream:
        return self

    def __deepcopy__(self, memo: object) -> Stream:
        """A copy of what names it works on the same stream."""
        return self

    def __repr__(self) -> str:
        inside = f" in {self.capture.name}" if self.capture is not None else ""
        return f"<stream {self.name}{inside}>"
