"""The report of a race: two accesses, and the edge that is missing between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from workspace.simulated.node import Range


@attrs.frozen
class Access:
    """One side of a race.

    Attributes
    ----------
    stream, stream_name, position
        Where it was enqueued; positions count along the stream.
    address, nbytes
        The range that was accessed.
    write
        Whether bytes were written.
    label, owner
        The launch's label, and who the bytes belonged to at the time (empty if nobody said).
    site
        ``file:line in function`` of the launch, innermost first; empty unless the device records sites.
    graph
        Name of the replayed graph it happened in, empty outside.
    """

    stream: int
    stream_name: str
    position: int
    address: int
    nbytes: int
    write: bool
    label: str
    owner: str
    site: tuple[str, ...] = ()
    graph: str = ""

    def __str__(self) -> str:
        verb = "writes" if self.write else "reads"
        owner = f" of {self.owner}" if self.owner else ""
        where = f" in {self.graph}" if self.graph else ""
        lines = [
            f"{self.label!r}{where} {verb} [{self.address:#x}, +{self.nbytes}){owner}"
            f" on stream {self.stream} ({self.stream_name}) at {self.position}"
        ]
        lines += [f"    {frame}" for frame in self.site]
        return "\n".join(lines)


@attrs.define
class Race:
    """Two conflicting accesses that no edge orders.

    Attributes
    ----------
    first, second
        The accesses, in host order.
    address, nbytes
        The bytes both touch.
    known
        How far along the first stream the second access is ordered after.
    needed
        How far it would have to be.
    count
        How often this pair (same labels, streams and bytes) was found; also those of its kind that were not kept.
    """

    first: Access
    second: Access
    address: int
    nbytes: int
    known: int
    needed: int
    count: int = 1

    @property
    def missing(self) -> str:
        """The edge that would order the pair."""
        gap = f"up to {self.known}, needs {self.needed}"
        inside = f"inside {self.first.graph}, " if self.first.graph == self.second.graph != "" else ""
        return f"{inside}stream {self.second.stream} knows stream {self.first.stream} {gap}"

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        hint = "" if self.first.site or self.second.site else "\n  for call sites: simulated.Device(..., sites=True)"
        return (
            f"race on {self.nbytes} bytes at {self.address:#x}{times}\n  {self.first}\n"
            f"  {self.second}\n  {self.missing}{hint}"
        )


def touched(ranges: Iterable[Range], start: int, end: int) -> Range:
    """The first of some ranges that shares bytes with ``[start, end)``; one does."""
    return next((a, n) for a, n in ranges if a < end and start < a + n)


def frames(site: tuple[Any, ...]) -> tuple[str, ...]:
    """Readable frames of a recorded call site."""
    return tuple(f"{code.co_filename}:{line} in {code.co_qualname}" for code, line in site)
