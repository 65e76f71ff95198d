"""Typed errors of the caches."""

from __future__ import annotations

from dsv4.errors import RequestError
from workspace.errors import WorkspaceError


class CacheError(WorkspaceError, ValueError):
    """A cache is not of the format, or has not the size, of the pages it is read or written as; nothing was touched."""


class CacheFull(RequestError):
    """A request needs more blocks than are free; nothing was taken."""
