"""Poison: what freshly allocated memory holds, written in stream order by the stream it was allocated for.

Old contents would often be the right ones (the same loop wrote them the time before), and would hide a reader that
runs too early. The pattern is not-a-number in every floating-point type, and -1 in the signed integers.
"""

from __future__ import annotations

import ctypes

import torch

BYTE = 0xFF
BOOL = 0x01
"""Other values than 0 and 1 are undefined behaviour in a bool."""

Fill = tuple[int, int, int]
"""(first address, byte value, bytes)."""


class Poison:
    """A node's function: fills new tensors.

    Parameters
    ----------
    fills
        What to write where.
    keep
        Aliases of the tensors, so that the bytes stay mapped.
    """

    __slots__ = ("_fills", "_keep")

    def __init__(self, fills: list[Fill], keep: list[torch.Tensor]) -> None:
        self._fills = fills
        self._keep = keep

    def __call__(self) -> None:
        for address, value, nbytes in self._fills:
            ctypes.memset(address, value, nbytes)
