"""The Flash model replayed in eager mode on the generated trace, for the benchmarks."""

from __future__ import annotations

from typing import Any

import workspace
from workspace.config import WorkspaceConfig
from workspace.sweep.plan import Replay
from workspace.sweep.session import open_session

FLASH = Replay("dsv4", "flash", None, "simulated", None, 0)


def session_and_steps(count: int) -> tuple[Any, list[Any]]:
    """The session of the default sweep, and its first steps."""
    session = open_session(FLASH)
    return session, list(session.steps(count))


def open_workspace(strategy: str, device: Any, statistics: bool = False) -> Any:
    """A workspace with the default settings, but for the strategy and the count of bytes."""
    return workspace.create(device=device, config=WorkspaceConfig(strategy, allow_unsafe=True, statistics=statistics))
