"""Device truth about order: what each stream, and the host, is known to come after.

This is the judge's own arithmetic. It shares nothing with ``workspace.clocks``, which it is there to check.
A position on a stream names one clock and one only: whenever a stream's clock changes, its position advances.
So knowing (stream, position) implies knowing that position's clock, and a wait that teaches nothing costs a
lookup.
"""

from __future__ import annotations

Clock = dict[int, int]
"""Stream key -> last position known to be ordered before. Replaced, never mutated."""


class Point:
    """A place in one stream's order, with what that stream knew there."""

    __slots__ = ("clock", "position", "stream")

    def __init__(self, stream: int, position: int, clock: Clock) -> None:
        self.stream = stream
        self.position = position
        self.clock = clock


class Track:
    """One stream's line of work: positions count its launches and the changes of its knowledge."""

    __slots__ = ("clock", "key", "position", "seen")

    def __init__(self, key: int, clock: Clock | None = None, seen: int = 0) -> None:
        self.key = key
        self.position = 0
        self.clock: Clock = {} if clock is None else clock
        self.seen = seen

    def point(self) -> Point:
        """The stream's present end."""
        return Point(self.key, self.position, self.clock)

    def learn(self, point: Point) -> None:
        """Order everything enqueued from now on after `point`."""
        key, mine, stream = self.key, self.clock, point.stream
        if stream == key or mine.get(stream, 0) >= point.position:
            return
        merged = mine.copy()
        for other, at in point.clock.items():
            if other != key and merged.get(other, 0) < at:
                merged[other] = at
        merged[stream] = point.position
        self.clock = merged
        self.position += 1

    def absorb(self, clock: Clock) -> None:
        """Order everything enqueued from now on after all that `clock` names."""
        mine = self.clock
        if all(mine.get(stream, 0) >= at for stream, at in clock.items() if stream != self.key):
            return
        merged = {stream: max(at, mine.get(stream, 0)) for stream, at in clock.items()}
        self.clock = {**mine, **merged}
        self.clock.pop(self.key, None)
        self.position += 1


class Host:
    """What the host has seen complete; every later operation, on any stream, comes after it."""

    __slots__ = ("clock", "version")

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0

    def learn(self, point: Point) -> None:
        """The host synchronised with `point`, or saw it complete in a query."""
        if self.clock.get(point.stream, 0) < point.position:
            self.clock = merge(self.clock, point)
            self.version += 1

    def enter(self, track: Track) -> None:
        """Bring a stream up to what the host knows, before it enqueues or records."""
        if track.seen != self.version:
            track.seen = self.version
            track.absorb(self.clock)


def merge(clock: Clock, point: Point) -> Clock:
    """The least clock that knows `clock` and `point` (and therefore everything before it)."""
    merged = dict(clock)
    for stream, at in point.clock.items():
        if merged.get(stream, 0) < at:
            merged[stream] = at
    if merged.get(point.stream, 0) < point.position:
        merged[point.stream] = point.position
    return merged


def knows(stream: int, clock: Clock, other: int, position: int) -> bool:
    """Whether an operation on `stream` with `clock` comes after (`other`, `position`)."""
    return stream == other or clock.get(other, 0) >= position
