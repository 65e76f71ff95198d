"""Typed errors of serving."""

from __future__ import annotations

from workspace.errors import CapacityError, ConfigError, WorkspaceError


class TokenizerError(ConfigError):
    """A checkpoint's tokenizer cannot be read."""


class BudgetError(CapacityError):
    """Workspace and caches do not fit the memory they share; `fields` hold the numbers."""


class StepError(WorkspaceError, RuntimeError):
    """A step of the model failed. Its requests ended with this error; the others go on."""
