"""Which owner bytes belonged to at a time: labels for reports."""

from __future__ import annotations

from bisect import bisect_right

KEEP = 16384
"""Labels kept in full; of older ones only those that no later label covers."""


class Owners:
    """Labels in the order they were given, so that a freed and reused range still names its earlier owner."""

    def __init__(self) -> None:
        self._labels: list[tuple[int, int, int, str]] = []

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, tick: int, address: int, nbytes: int, owner: str) -> None:
        """From operation number `tick` on, the bytes belong to `owner`."""
        self._labels.append((tick, address, address + nbytes, owner))
        if len(self._labels) > 2 * KEEP:
            self._labels = visible(self._labels[:-KEEP]) + self._labels[-KEEP:]

    def at(self, tick: int, start: int, end: int) -> str:
        """Owner of bytes at operation number `tick`, the latest label that overlaps them; empty if none does."""
        index = bisect_right(self._labels, tick, key=lambda label: label[0])
        for _, first, last, owner in reversed(self._labels[:index]):
            if first < end and start < last:
                return owner
        return ""


def visible(labels: list[tuple[int, int, int, str]]) -> list[tuple[int, int, int, str]]:
    """Labels some of whose bytes carry no later label."""
    kept: list[tuple[int, int, int, str]] = []
    covered: list[tuple[int, int]] = []
    for label in reversed(labels):
        _, start, end, _ = label
        index = bisect_right(covered, (start, end)) - 1
        inside = index >= 0 and covered[index][1] >= end
        if not inside:
            kept.append(label)
            covered = _union(covered, start, end)
    return kept[::-1]


def _union(covered: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    i = 0
    while i < len(covered) and covered[i][1] < start:
        i += 1
    j = i
    while j < len(covered) and covered[j][0] <= end:
        start, end = min(start, covered[j][0]), max(end, covered[j][1])
        j += 1
    return [*covered[:i], (start, end), *covered[j:]]
