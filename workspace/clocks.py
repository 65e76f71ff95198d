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

from collections.abc import Iterable

Seen = dict[int, int]
"""Stream id -> largest epoch ordered before."""


class Clocks:
    """Order between streams, without any device call.

    Not thread-safe: the caller's lock covers the check, the device calls and the hand-out.
    """

    __slots__ = ("_next", "_waited", "epoch", "host", "seen")

    def __init__(self) -> None:
        self._next = 0
        self.epoch: dict[int, int] = {}
        self.seen: dict[int, Seen] = {}
        self.host: Seen = {}
        self._waited: dict[int, int] = {}  # the epoch of a stream's own in which it waited last

    def add(self) -> int:
        """A new stream, which has seen nothing; its first epoch is 1. Ids are never reused."""
        self._next += 1
        self.epoch[self._next] = 1
        self.seen[self._next] = {}
        self._waited[self._next] = 0
        return self._next

    def forget(self, streams: Iterable[int]) -> None:
        """Drop streams that nothing will be asked about again (a capture's, at its end)."""
        for stream in streams:
            del self.epoch[stream]
            del self.seen[stream], self._waited[stream]

    def record(self, stream: int) -> Seen:
        """Close the stream's epoch and return what an event recorded now covers.

        Called *before* the device's record: a use stamped by another thread in between then carries the next epoch,
        which the event does not claim to cover.
        """
        covered = dict(self.seen[stream])
        covered[stream] = self.epoch[stream]
        self.epoch[stream] += 1
        return covered

    def wait(self, stream: int, covered: Seen) -> None:
        """The stream's later work comes after the event. Called *after* the device's wait has returned.

        What is seen, or covered, never changes in place: a stream shares it with the event.
        """
        if covered.get(stream, 0) < self._waited[stream]:
            covered = {**self.seen[stream], **covered}
            merge(covered, self.seen[stream])
        # Else the event comes after all this stream has waited for, so it knows at least as much: nothing to compare.
        self.seen[stream] = covered
        self._waited[stream] = self.epoch[stream]

    def complete(self, covered: Seen) -> None:
        """The host has seen the event complete: everything it covers precedes whatever is enqueued from now on."""
        merge(self.host, covered)

    def settle(self) -> None:
        """Let go of what streams have seen and the host has, too: it precedes all work anyway.

        Else a process that meets ever new streams would remember each of them at each of them.
        """
        host = self.host
        for stream, seen in self.seen.items():
            if seen:  # not in place: an event may share it
                self.seen[stream] = {used: epoch for used, epoch in seen.items() if host.get(used, 0) < epoch}

    def ordered(self, stream: int, used: int, epoch: int) -> bool:
        """Whether work enqueued now on `stream` comes after the use ``(used, epoch)``."""
        return used == stream or self.seen[stream].get(used, 0) >= epoch or self.host.get(used, 0) >= epoch

    def barrier(self, streams: Iterable[int]) -> None:
        """Everything so far on each of the streams precedes later work on all of them (a graph segment's end)."""
        streams = tuple(streams)
        covered: Seen = {}
        for stream in streams:
            merge(covered, self.record(stream))
        for stream in streams:
            self.wait(stream, covered)


def merge(into: Seen, other: Seen) -> None:
    """Keep the larger epoch of each stream, in place."""
    get = into.get
    for stream, epoch in other.items():
        if get(stream, 0) < epoch:
            into[stream] = epoch
