"""Adaptors wrap a strategy for accounting and debugging; an absent one costs nothing."""

from workspace.adaptors.compose import compose

__all__ = ["compose"]
