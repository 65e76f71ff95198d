"""Why the workspace fenced, grew or refused: counted by pair of call sites, with the edge that was missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from workspace.block import Block
    from workspace.request import Request
    from workspace.streams import Stream

PACKAGE = f"{Path(__file__).parent}{os.sep}"

Kind = Literal["fence", "growth", "refusal"]

Key = tuple[Kind, str, str, str, str]
"""Kind, owner and site, and those of the other."""

Tally = list[int]
"""One number, which notes of the same reason share."""

Note = tuple[CodeType, int, str, str, Tally]
"""Code and instruction of a call, owner and site of who used the bytes before, and where it is counted."""

LOOKED_UP, ONE_IN = 64, 8
"""Fences of a request that are all looked up; of those that follow one in so many is, and stands for the others."""

NOTES_KEPT = 16
"""Notes of a request; what is fenced at more places is looked up each time."""


def call_site() -> str:
    """``file:line`` of the nearest caller outside this library (and outside contextlib)."""
    return _site(_outside(sys._getframe(1)))


def _outside(frame: FrameType) -> FrameType:
    while frame.f_back is not None and _inside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _inside(file: str) -> bool:
    return file.startswith(PACKAGE) or file.endswith("contextlib.py")


def _site(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@attrs.frozen
class Reason:
    """One line of an explanation.

    Attributes
    ----------
    kind
        ``"fence"``, ``"growth"`` or ``"refusal"``.
    owner, site
        Who asked, and where in the caller's code.
    other, other_site
        Who used the bytes before (fences); the site is known when statistics are on.
    edge
        The order that was missing: "main knows aux0 up to 4, needs 6".
    """

    kind: Kind
    owner: str
    site: str
    other: str = ""
    other_site: str = ""
    edge: str = ""

    def __str__(self) -> str:
        text = f"{self.kind} for {self.owner} at {self.site}"
        if self.other:
            text += f", used before by {self.other}" + (f" at {self.other_site}" if self.other_site else "")
        return text + (f": {self.edge}" if self.edge else "")


class Explanations:
    """Counts reasons; the epochs of an edge are those of its first occurrence."""

    def __init__(self) -> None:
        self._counts: dict[Key, Tally] = {}
        self._edges: dict[Key, str] = {}

    def note(self, kind: Kind, request: Request, block: Block | None = None, edge: str = "") -> None:
        other = block.request.owner if block is not None and block.request is not None else ""
        key: Key = (kind, request.owner, call_site(), other, block.site if block is not None else "")
        self._count(key, edge)

    def asleep(self, owner: str, since: str) -> None:
        """A refusal to an owner by a workspace that sleeps."""
        self._count(("refusal", owner, call_site(), "", ""), f"asleep since {since}")

    def _count(self, key: Key, edge: str) -> Tally:
        tally = self._counts.setdefault(key, [0])
        tally[0] += 1
        self._edges.setdefault(key, edge)
        return tally

    def fence(self, request: Request, block: Block, stream: Stream, owner: Stream, needs: int, knows: int) -> None:
        """A fence for a request, which had a block's last use on `owner` to wait for.

        A request remembers its call sites by instruction. The number of its fences is exact; from the 64th at one place
        on, those that come between two looks at the call site are counted where the first of them was.
        """
        last = request.noted
        if last is not None and last[0] >= LOOKED_UP and last[0] % ONE_IN:
            last[0] += 1
            return
        frame = _outside(sys._getframe(1))
        other = block.request.owner if block.request is not None else ""
        for code, instruction, before, site, tally in request.notes:
            if code is frame.f_code and instruction == frame.f_lasti and before is other and site is block.site:
                tally[0] += 1
                request.noted = tally
                return
        key: Key = ("fence", request.owner, _site(frame), other, block.site)
        tally = self._count(key, f"{stream.name} knows {owner.name} up to {knows}, needs {needs}")
        if len(request.notes) < NOTES_KEPT:
            request.notes.append((frame.f_code, frame.f_lasti, other, block.site, tally))

    def top(self, count: int = 10) -> list[tuple[Reason, int]]:
        """The most frequent reasons with their counts."""
        most = sorted(self._counts.items(), key=lambda entry: -entry[1][0])[:count]
        return [(Reason(*key, self._edges[key]), tally[0]) for key, tally in most]
