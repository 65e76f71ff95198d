"""Which lease has had which bytes since when: what tells a tensor of an earlier lease from one of the present lease.

A pool hands a repeated lease the tensors it has made before. On this device each lease gets tensor objects of its own
over the same bytes, and each carries what it was lent by, as does every view of it. An access through one is late as
soon as bytes it touches have been lent again, on whatever stream it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

import torch

from workspace.simulated.node import Range
from workspace.simulated.ranges import ranges_of
from workspace.simulated.sites import Site
from workspace.simulated.virtual import VirtualTensor

TENSORS = frozenset({VirtualTensor, torch.Tensor, torch.nn.Parameter})
"""What carries what it is lent by, as its attribute ``_lending``."""


class Since(NamedTuple):
    """A later lending of some of the bytes."""

    start: int
    end: int
    owner: str
    site: Site


class Lending:
    """One lease's turn with its bytes, and the first that each byte was lent to after it."""

    __slots__ = ("owner", "since", "site")

    def __init__(self, owner: str, site: Site) -> None:
        self.owner = owner
        self.site = site
        self.since: list[Since] = []

    def __reduce__(self) -> Any:
        """Nothing: a copy of a tensor, or one that is read from a file, is of other bytes."""
        return set, ()

    def over(self, spans: tuple[Range, ...]) -> tuple[Range, Since] | None:
        """The first span some bytes of which somebody else has had since, and who."""
        for span in spans:
            for since in self.since:
                if since.start < span[0] + span[1] and span[0] < since.end:
                    return span, since
        return None


class Use(NamedTuple):
    """An access through a tensor of a lease some of whose bytes have been lent again."""

    lending: Lending
    spans: tuple[Range, ...]
    write: bool


Piece = tuple[int, int, Lending]
"""(first address, end, whose)."""


class Lendings:
    """An interval map: for each byte, the lending it is of. Called with the device's lock held."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._present: list[Piece] = []

    def __len__(self) -> int:
        return len(self._present)

    def lend(self, address: int, nbytes: int, owner: str, site: Site) -> Lending:
        """From now on the bytes are of this lending, and all tensors of earlier ones late there."""
        start, end = address, address + nbytes
        lending = Lending(owner, site)
        for first, last, before in self._replace(start, end, (start, end, lending)):
            before.since.append(Since(max(first, start), min(last, end), owner, site))
        return lending

    def forget(self, start: int, end: int) -> None:
        """The bytes went back to the device."""
        self._replace(start, end)

    def _replace(self, start: int, end: int, *pieces: Piece) -> list[Piece]:
        """Put pieces in the place of ``[start, end)``; returns what was there, as it was."""
        present, starts = self._present, self._starts
        i = bisect_right(starts, start)
        if i and present[i - 1][1] > start:
            i -= 1
        j = bisect_left(starts, end, i)
        before = present[i:j]
        if before:
            (first, _, earlier), (_, last, later) = before[0], before[-1]
            left = ((first, start, earlier),) if first < start else ()
            right = ((end, last, later),) if last > end else ()
            pieces = (*left, *pieces, *right)
        present[i:j] = pieces
        starts[i:j] = [piece[0] for piece in pieces]
        return before


def hand_out(tensors: list[Any], lending: Lending | None) -> None:
    """Put a new object over the same bytes in the place of each tensor, of this lending, or of none that is judged."""
    if tensors and type(tensors[0]) is VirtualTensor:
        tensors[:] = [tensor.handed_out(lending) for tensor in tensors]
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch._C._InferenceMode(False):
        for index, tensor in enumerate(tensors):
            tensors[index] = made = tensor.detach()
            if lending is not None:
                made._lending = lending


def carry(result: Any, args: Any) -> Any:
    """What an operator made of metadata alone: views are of the lending that their source is of."""
    lending = getattr(args[0], "_lending", None) if args else None
    if lending:
        for view in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(view, torch.Tensor):
                view._lending = lending  # type: ignore[attr-defined]
    return result


def lending_of(tensor: Any) -> Lending | None:
    """What a tensor is lent by, if some of that has been lent again; None else."""
    lending = getattr(tensor, "_lending", None)
    return lending if lending and lending.since else None


def late_uses(reads: tuple[Any, ...], writes: tuple[Any, ...]) -> list[Use]:
    """Those of a launch's tensors that have been lent again."""
    found = []
    for item in reads + writes:
        if type(item) in TENSORS:
            lending = getattr(item, "_lending", None)
            if lending and lending.since:
                found.append(Use(lending, ranges_of((item,)), any(item is one for one in writes)))
    return found
