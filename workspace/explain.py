"""Why the workspace fenced, grew or refused: counted by pair of call sites, with the edge that was missing."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    from workspace.block import Block
    from workspace.request import Request

_PACKAGE = f"{Path(__file__).parent}{os.sep}"

Kind = Literal["fence", "growth", "refusal"]


def call_site() -> str:
    """``file:line`` of the nearest caller outside this library (and outside contextlib)."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_code.co_filename.endswith("contextlib.py")
    ):
        frame = frame.f_back
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
        self._counts: Counter[tuple[Kind, str, str, str, str]] = Counter()
        self._edges: dict[tuple[Kind, str, str, str, str], str] = {}

    def note(self, kind: Kind, request: Request, block: Block | None = None, edge: str = "") -> None:
        other = block.request.owner if block is not None and block.request is not None else ""
        key = (kind, request.owner, call_site(), other, block.site if block is not None else "")
        self._counts[key] += 1
        self._edges.setdefault(key, edge)

    def top(self, count: int = 10) -> list[tuple[Reason, int]]:
        """The most frequent reasons with their counts."""
        return [(Reason(*key, self._edges[key]), times) for key, times in self._counts.most_common(count)]
