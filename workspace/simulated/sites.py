"""Call sites: who enqueued an operation, kept as (code, line) pairs and formatted only for a report."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import torch

DEPTH = 6
SKIPPED = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
ACQUIRE = (*SKIPPED, *(str(Path(__file__).parents[1] / name) for name in ("lease.py", "ranged.py", "workspace.py")))
"""What stands between whoever acquires a lease and the device."""

Site = tuple[tuple[CodeType, int], ...]


def call_site(skipped: tuple[str, ...] = SKIPPED) -> Site:
    """The innermost frames outside the simulated device and torch's dispatch, at most six."""
    frame = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < DEPTH:
        if not frame.f_code.co_filename.startswith(skipped):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)
