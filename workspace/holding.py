"""What a thread holds: bytes with an acquiring stream, and the other streams declared to use them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from workspace.block import Uses
from workspace.clocks import merge
from workspace.streams import Event, Stream

if TYPE_CHECKING:
    from workspace.fork import Fork
    from workspace.provider import WorkspaceProvider
    from workspace.timeline import Timeline

OPEN = 0
"""Instead of an epoch: the stream may use the bytes until the release, which stamps the use; no join closes it."""


class Held(dict["Holding | Fork", None]):
    """What one thread holds in one slot, and the forks it has open there, in the order they began.

    What stands before a fork was held when it began, what stands behind it was acquired inside. A dict, because a
    release finds its lease at once among any number, also from another thread.
    """

    __slots__ = ()

    def holdings(self) -> list[Holding]:
        """The leases, without the forks."""
        return [one for one in list(self) if isinstance(one, Holding)]

    def open_forks(self) -> list[Fork]:
        """The forks, without the leases; also those of other threads that a branch is in."""
        return [one for one in list(self) if not isinstance(one, Holding)]

    def forks_around(self, holding: Holding) -> list[Fork]:
        """Open forks that declare their branches for a holding: those that began while it was held."""
        return [one for one in self._behind(holding) if not isinstance(one, Holding)]

    def acquired_inside(self, fork: Fork) -> list[Holding]:
        """What was acquired since a fork began."""
        return [one for one in self._behind(fork) if isinstance(one, Holding)]

    def _behind(self, mark: Holding | Fork) -> list[Holding | Fork]:
        everything = list(self)  # one step, also while another thread releases a lease of this one's
        return everything[everything.index(mark) + 1 :] if mark in everything else []


class Holding:
    """Base of leases and of a footprint during a replay.

    Attributes
    ----------
    stream
        The acquirer's; its use is stamped at release.
    uses
        Declared uses on other streams: `OPEN`, or the epoch at which another stream than the acquirer joined a
        branch. None while there is none. What the acquirer itself has joined precedes its own use.
    held
        The list it is in: a release inside an open fork counts the fork's branches too.
    """

    __slots__ = ("held", "stream", "uses")

    stream: Stream
    uses: Uses | None
    held: Held

    def forked(self) -> bool:
        """A fork of the holder begins; returns whether `unforked` must be called at its end."""
        return False

    def unforked(self) -> None:
        """The outermost fork around it has ended."""

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
        """A join, by another stream than the acquirer's, has recorded the stream's uses so far."""
        if stream.capture is self.stream.capture and stream is not self.stream:
            if self.uses is None:
                self.uses = {}
            if self.uses.get(stream.id) != OPEN:
                self.uses[stream.id] = epoch

    def stamped(self, timeline: Timeline) -> Uses:
        """Last uses as of now: joined branches as recorded, everything else at its stream's last epoch."""
        found = {self.stream.id: timeline.last_epoch(self.stream)}
        if self.uses:
            for used, epoch in self.uses.items():
                found[used] = epoch or timeline.last_epoch(timeline.stream_of(used))
        for fork in self.held.forks_around(self):
            for stream in fork.branches_of(self):
                found[stream.id] = stream.clock.epoch
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

    @property
    def parent(self) -> WorkspaceProvider:
        """The workspace's provider, outside any capture."""
        raise NotImplementedError

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

    def last_uses(self, uses: Uses) -> Uses:
        """The uses up to a release, and those of the replays of graphs that have gone since."""
        if self.replays is not None:
            merge(uses, self.replays)
            self.replays = None
        return uses

    def let_go(self) -> None:
        """Return the bytes if they are released. Called with the timeline's lock held."""
        raise NotImplementedError


class Footprint(Holding):
    """The bytes of a graph while an eager break or a replay runs: forks declare their branches for it too."""

    __slots__ = ()

    def __init__(self, stream: Stream, held: Held) -> None:
        self.stream = stream
        self.uses = None
        self.held = held


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
        self.held = Held()
        self.lane = "main"
        self.micro_batch = 0
        self._held = {0: self.held}

    def enter(self, lane: str, micro_batch: int) -> None:
        """Change the slot."""
        self.lane, self.micro_batch = lane, micro_batch
        if micro_batch not in self._held:
            self._held[micro_batch] = Held()
        self.held = self._held[micro_batch]
