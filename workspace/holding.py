"""What a thread holds: bytes with an acquiring stream, and the other streams declared to use them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from workspace.block import Uses
from workspace.clocks import merge
from workspace.streams import Event, Stream

if TYPE_CHECKING:
    from workspace.timeline import Timeline

OPEN = 0
"""Instead of an epoch: the stream may still use the bytes, so that the use is stamped at release."""


class Holding:
    """Base of leases and of a footprint during a replay.

    Attributes
    ----------
    stream
        The acquirer's; its use is stamped at release.
    uses
        Declared uses on other streams: the epoch closed by a join, or `OPEN`. None while there is none, so that a
        lease which one stream keeps to itself allocates nothing.
    """

    __slots__ = ("stream", "uses")

    stream: Stream
    uses: Uses | None

    def declare(self, stream: Stream) -> None:
        """A stream may use the bytes from now on.

        Across the border of a capture nothing is declared: a graph that uses an eager lease pins it, and an eager break
        that uses a captured one does so through the footprint.
        """
        if stream is not self.stream and stream.capture is self.stream.capture:
            if self.uses is None:
                self.uses = {}
            self.uses[stream.id] = OPEN

    def joined(self, stream: Stream, epoch: int) -> None:
        """A join has recorded the stream's uses so far, and its branch is over."""
        if self.uses is not None and self.uses.get(stream.id) == OPEN:
            self.uses[stream.id] = epoch

    def stamped(self, timeline: Timeline) -> Uses:
        """Last uses as of now: joined branches as recorded, everything else at its stream's current epoch."""
        epochs = timeline.clocks.epoch
        found = {self.stream.id: epochs[self.stream.id]}
        if self.uses:
            for used, epoch in self.uses.items():
                found[used] = epoch or epochs[used]
        return found


class Pinnable(Holding):
    """A holding whose bytes return only once its release *and* the end of every graph that may use them have come.

    Attributes
    ----------
    pins
        Number of such graphs and open captures.
    replays, events
        Last uses of its bytes by replays of them, and the events of those recorded at once.
    """

    __slots__ = ("events", "pins", "replays")

    pins: int
    replays: Uses | None
    events: dict[int, Event] | None

    def pin(self) -> None:
        self.pins += 1

    def unpin(self) -> None:
        """A graph that pinned it is gone; the last one lets a released lease's bytes go."""
        self.pins -= 1
        if not self.pins:
            self.let_go()

    def replayed(self, uses: Uses, timeline: Timeline) -> None:
        """A replay may have used the bytes."""
        if self.replays is None:
            self.replays = {}
        merge(self.replays, uses)
        recorded = timeline.exact_events(uses)
        if recorded:
            self.events = {**(self.events or {}), **recorded}

    def let_go(self) -> None:
        """Return the bytes if they are released. Called with the timeline's lock held."""
        raise NotImplementedError


class Footprint(Holding):
    """The bytes of a graph while an eager break or a replay runs: forks declare their branches for it too."""

    __slots__ = ()

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.uses = None


class ThreadState(threading.local):
    """The calling thread's slot, and the leases it holds there.

    Attributes
    ----------
    held
        Leases of this thread and micro-batch, in order of acquisition: a fork declares its branches for each.
    lane, micro_batch
        The ambient slot; see `Workspace.slot`.
    """

    def __init__(self) -> None:
        self.held: list[Holding] = []
        self.lane = "main"
        self.micro_batch = 0
        self._held = {0: self.held}

    def enter(self, lane: str, micro_batch: int) -> None:
        """Change the slot."""
        self.lane, self.micro_batch = lane, micro_batch
        self.held = self._held.setdefault(micro_batch, [])
