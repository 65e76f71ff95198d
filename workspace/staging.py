"""Staging: pinned host memory for copies to the device that the host does not wait for."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workspace import argument
from workspace.errors import ArgumentError, CapacityError, CaptureError, LeaseReleased, SizeError, WorkspaceError
from workspace.process import OfProcess
from workspace.slot import Slot
from workspace.streams import CURRENT, Event, Stream

if TYPE_CHECKING:
    from workspace.timeline import Timeline


class StagingSlot(OfProcess):
    """One stretch of pinned memory, to be filled and uploaded inside ``with staging.fill()``.

    Attributes
    ----------
    memory
        Its bytes, writable: ``memory[:3] = b"abc"``, ``numpy.frombuffer(slot.memory, dtype)``. Not to be kept.
    """

    __slots__ = ("_copies", "_host", "_open", "_timeline", "memory")

    def __init__(self, timeline: Timeline, nbytes: int) -> None:
        self._timeline = timeline
        self._host = timeline.call(timeline.driver.pinned, nbytes)
        self._copies: dict[Stream, Event | None] = {}
        self._open = False
        array: Any = (ctypes.c_ubyte * nbytes).from_address(self._host.data_ptr())
        self.memory = memoryview(array).cast("B")

    def upload(self, tensor: Any, *, offset: int = 0, stream: object = CURRENT) -> None:
        """Enqueue a copy of the bytes from `offset` on to the whole of a device tensor.

        Parameters
        ----------
        tensor
            Contiguous, of any dtype; a lease's tensor or slot, or any other of the device.
        offset
            Bytes into the slot.
        stream
            Where the copy runs; omitted, the caller's current stream. For a lease it is a use like any other.

        Raises
        ------
        SizeError
            The tensor is larger than the rest of the slot.
        CaptureError
            The stream captures: each replay would read the slot, which is somebody else's by then.
        LeaseReleased
            The ``with`` block has ended.
        """
        if not self._open:
            raise LeaseReleased("a staging slot is uploaded outside its with block", "upload inside staging.fill()")
        argument.memory("an upload to", tensor)
        argument.integer("offset", offset)
        timeline = self._timeline
        with timeline.lock:
            timeline.ready()
            target = timeline.current() if stream is CURRENT else timeline.inside(timeline.of(stream))
            if target.capture is not None or timeline.call(timeline.driver.capture_of, target.key):
                raise CaptureError(
                    f"an upload on {target!r} inside a capture: each replay would read the staging slot anew",
                    "upload before the replay, into a persistent buffer that the graph reads",
                )
            # Not before: what a lease's slot allocates in a capture is the graph's.
            if isinstance(tensor, Slot):
                tensor = tensor.tensor()
            nbytes = tensor.numel() * tensor.element_size()
            self._check(tensor, nbytes, offset)
            if nbytes:
                self._copies[target] = None  # until its event is recorded, only an idle stream tells of the end
                timeline.call(timeline.driver.upload, self._host, offset, tensor, target.key)
                # Its own, which later records on the stream do not move.
                self._copies[target] = timeline.exact_event(target)

    def _check(self, tensor: Any, nbytes: int, offset: int) -> None:
        if not getattr(tensor, "is_contiguous", lambda: True)():
            raise ArgumentError("an upload to a tensor that is not contiguous", "upload to a contiguous one, and copy")
        if offset < 0 or offset + nbytes > len(self.memory):
            raise SizeError(
                f"an upload of {nbytes} bytes from byte {offset} of a staging slot of {len(self.memory)}",
                "make the slots larger: ws.staging(name, nbytes)",
                asked=nbytes, offset=offset, capacity=len(self.memory),
            )  # fmt: skip

    def await_copies(self) -> None:
        """Block the host until every copy out of the slot is over."""
        timeline = self._timeline
        while self._copies:
            stream, event = next(iter(self._copies.items()))
            if event is None:
                timeline.synchronize(stream)
            else:
                timeline.await_event(event)
            del self._copies[stream]


class Staging(OfProcess):
    """A ring of slots: the one whose copies were enqueued first is the next to be filled.

    Made by `Workspace.staging`. With several slots the host runs so many copies ahead before it waits for one.

    Attributes
    ----------
    nbytes
        Of each slot.
    slots
        How many there are.
    closed
        Whether its workspace is.
    """

    def __init__(self, timeline: Timeline, name: str, nbytes: int, slots: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.slots = slots
        self.closed = False
        self._waiting = deque(StagingSlot(timeline, nbytes) for _ in range(slots))

    def __repr__(self) -> str:
        return f"<staging {self.name}: {self.slots} slots of {self.nbytes} bytes>"

    @contextmanager
    def fill(self) -> Iterator[StagingSlot]:
        """A slot that no copy reads any more, for the ``with`` block; blocks the host until the oldest one is such.

        Raises `CapacityError` while every slot is inside a ``with`` block, of this thread or another.
        """
        if self.closed:
            raise WorkspaceError(f"{self!r} belongs to a workspace that is closed", "create another")
        slot = self._taken()
        try:
            slot.await_copies()
            slot._open = True
            yield slot
        finally:
            slot._open = False
            self._waiting.append(slot)

    def _taken(self) -> StagingSlot:
        try:
            return self._waiting.popleft()
        except IndexError:
            raise CapacityError(
                f"all {self.slots} slots of staging {self.name!r} are being filled",
                "ask for more slots: ws.staging(name, nbytes, slots=...)",
                capacity=self.slots, setting="slots",
            ) from None  # fmt: skip

    def close(self) -> None:
        """Block the host until no copy reads any of the slots; none is filled any more."""
        self.closed = True
        for slot in list(self._waiting):
            slot.await_copies()
