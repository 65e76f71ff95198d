"""Typed errors of tensor parallel."""

from __future__ import annotations

from workspace.errors import WorkspaceError


class ParallelError(WorkspaceError, RuntimeError):
    """The ranks cannot run one model together."""
