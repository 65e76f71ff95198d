"""Which bytes a strided tensor touches, as intervals relative to its first element."""

from __future__ import annotations

from functools import lru_cache

ROWS = 1024
"""Most intervals a footprint is split into. Beyond it the hull stands in, and is marked as such."""

Interval = tuple[int, int]


@lru_cache(maxsize=1 << 14)
def footprint(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> tuple[tuple[Interval, ...], bool]:
    """The byte intervals of a strided view.

    Parameters
    ----------
    shape, stride
        Of the view, in elements; strides are not negative (torch has none that are).
    itemsize
        Bytes of an element.

    Returns
    -------
    intervals
        Disjoint ``(offset, length)`` pairs in bytes, ascending, adjacent ones joined.
    hull
        True when the view has more than `ROWS` separate intervals, and one interval that also covers bytes the view
        never touches was returned in their place.
    """
    if 0 in shape:
        return (), False
    run = itemsize
    starts = [0]
    for size, step in sorted(
        ((n, s * itemsize) for n, s in zip(shape, stride, strict=True) if n > 1 and s), key=lambda dim: dim[1]
    ):
        if len(starts) == 1 and step <= run:
            run += step * (size - 1)
            continue
        if len(starts) * size > ROWS * 4:
            return ((0, _reach(shape, stride, itemsize)),), True
        starts = list({start + step * index for index in range(size) for start in starts})
    joined = _join(sorted(starts), run)
    if len(joined) > ROWS:
        return ((0, _reach(shape, stride, itemsize)),), True
    return tuple(joined), False


def _reach(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    return (sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1) * itemsize


def _join(starts: list[int], run: int) -> list[Interval]:
    joined: list[Interval] = []
    for start in starts:
        if joined and start <= joined[-1][0] + joined[-1][1]:
            first, length = joined[-1]
            joined[-1] = (first, max(length, start + run - first))
        else:
            joined.append((start, run))
    return joined


def extent(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    """Bytes of storage a view needs from its first element on (0 when it has none)."""
    return 0 if 0 in shape else _reach(shape, stride, itemsize)
