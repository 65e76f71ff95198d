"""Typed errors of the caches."""

from __future__ import annotations

from dsv4.errors import RequestError


class CacheFull(RequestError):
    """A request needs more blocks than are free; nothing was taken."""
