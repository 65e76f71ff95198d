"""Vector clocks of streams: is work enqueued now on one stream ordered after a use on another?

The core knows integers only. A stream's *epoch* counts the events recorded on it; work enqueued between two
records carries the epoch of that interval. A use is stamped ``(stream, epoch)``. Recording an event closes the epoch:
the event covers every use stamped with it or earlier, and nothing later. What a stream has *seen* of another is the
largest epoch whose work is ordered before the stream's next work.

A capture is a child timeline: each stream that takes part gets a fresh id here, which has seen nothing. Order that the
host saw complete therefore holds inside a capture and device order does not; and because the ids are forgotten at the
end, captured edges order nothing eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Seen = dict[int, int]
"""Stream id -> largest epoch ordered before."""

new_seen: Callable[[], Seen] = dict
"""What makes one that has seen nothing; the C++ form has a mapping that costs less (`workspace.native`)."""


class Clock:
    """What the clocks know of one stream.

    Attributes
    ----------
    id
        Names the stream in the clocks; never reused.
    epoch
        Its present epoch; the first is 1.
    seen
        What precedes its next work.
    waited
        The epoch of its own in which it waited last.
    """

    __slots__ = ("epoch", "id", "seen", "waited")

    def __init__(self, stream: int, seen: Seen) -> None:
        self.id = stream
        self.epoch = 1
        self.seen = seen
        self.waited = 0


new_clock: Callable[[int, Seen], Clock] = Clock
"""What makes a stream's clock; the C++ form has one that it reads without a look-up (`workspace.native`)."""


class Clocks:
    """Order between streams, without any device call.

    Not thread-safe: the caller's lock covers the check, the device calls and the hand-out.

    Attributes
    ----------
    of
        Each stream's clock, by its id.
    host
        What the host has seen complete.
    """

    __slots__ = ("_next", "host", "of")

    def __init__(self) -> None:
        self._next = 0
        self.of: dict[int, Clock] = {}
        self.host = new_seen()

    def add(self) -> int:
        """The id of a new stream, which has seen nothing. Ids are never reused."""
        self._next += 1
        self.of[self._next] = new_clock(self._next, new_seen())
        return self._next

    def forget(self, streams: Iterable[int]) -> None:
        """Drop streams that nothing will be asked about again (a capture's, at its end)."""
        for stream in streams:
            del self.of[stream]

    def record(self, stream: int) -> Seen:
        """Close the stream's epoch and return what an event recorded now covers.

        Called *before* the device's record: a use stamped by another thread in between then carries the next epoch,
        which the event does not claim to cover.
        """
        clock = self.of[stream]
        covered = clock.seen.copy()
        covered[stream] = clock.epoch
        clock.epoch += 1
        return covered

    def wait(self, stream: int, covered: Seen) -> None:
        """The stream's later work comes after the event. Called *after* the device's wait has returned.

        What is seen, or covered, never changes in place: a stream shares it with the event.
        """
        clock = self.of[stream]
        if covered.get(stream, 0) < clock.waited:
            covered = covered.copy()
            merge(covered, clock.seen)
        # Else the event comes after all this stream has waited for, so it knows at least as much: nothing to compare.
        clock.seen = covered
        clock.waited = clock.epoch

    def complete(self, covered: Seen) -> None:
        """The host has seen the event complete: everything it covers precedes whatever is enqueued from now on."""
        merge(self.host, covered)

    def settle(self) -> None:
        """Let go of what streams have seen and the host has, too: it precedes all work anyway.

        Else a process that meets ever new streams would remember each of them at each of them.
        """
        host = self.host
        for clock in self.of.values():
            if clock.seen:  # not in place: an event may share it
                left = new_seen()
                for used, epoch in clock.seen.items():
                    if host.get(used, 0) < epoch:
                        left[used] = epoch
                clock.seen = left

    def ordered(self, stream: int, used: int, epoch: int) -> bool:
        """Whether work enqueued now on `stream` comes after the use ``(used, epoch)``."""
        return used == stream or self.of[stream].seen.get(used, 0) >= epoch or self.host.get(used, 0) >= epoch

    def barrier(self, streams: Iterable[int]) -> Seen:
        """Everything so far on each of the streams precedes later work on all of them (a graph segment's end).

        Returns what is covered: it precedes streams that come later, too.
        """
        streams = tuple(streams)
        covered = new_seen()
        for stream in streams:
            merge(covered, self.record(stream))
        for stream in streams:
            self.wait(stream, covered)
        return covered


def merge(into: Seen, other: Seen) -> None:
    """Keep the larger epoch of each stream, in place."""
    get = into.get
    for stream, epoch in other.items():
        if get(stream, 0) < epoch:
            into[stream] = epoch
