"""Typed errors of the model side. Each names the value, the rule and the remedy."""

from __future__ import annotations

from workspace.errors import ConfigError, WorkspaceError


class ModelConfigError(ConfigError):
    """A model configuration cannot be this family's; `problems` lists everything that is wrong with it."""

    def __init__(self, problem: str, remedy: str = "", **fields: object) -> None:
        super().__init__(problem, remedy, **fields)
        problems = fields.get("problems")
        self.problems: tuple[str, ...] = tuple(problems) if isinstance(problems, list | tuple) else (problem,)


class TraceError(WorkspaceError, ValueError):
    """A request trace is truncated, or is not a request trace."""


class RequestError(WorkspaceError, ValueError):
    """A request or a step was refused; the other requests are not affected."""


class NoRoom(RequestError):
    """No request finds blocks; `request`, the oldest one, is to end so that the others can go on."""

    def __init__(self, problem: str, remedy: str = "", *, request: int, **fields: object) -> None:
        super().__init__(problem, remedy, request=request, **fields)
        self.request = request


class RunError(WorkspaceError, ValueError):
    """A run was asked for in a combination that does not exist."""


CORRECT = "correct the keys above; `dsv4.presets` holds two valid configs"


def listed(what: str, problems: list[str], remedy: str = CORRECT) -> ModelConfigError:
    """One error for all problems of one config."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    text = "".join(f"\n  - {problem}" for problem in problems)
    return ModelConfigError(f"{what} has {count}:{text}", remedy, problems=problems)
