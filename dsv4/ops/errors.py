"""The typed error of an op's arguments."""

from __future__ import annotations

from workspace import WorkspaceError


class OpError(WorkspaceError, ValueError):
    """An argument of an op has the wrong shape, dtype, device or memory; nothing was launched."""
