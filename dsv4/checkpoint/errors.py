"""Typed errors of checkpoint folders."""

from __future__ import annotations

from collections.abc import Sequence

from workspace.errors import WorkspaceError

SHOWN = 100
"""Problems that a message spells out; ``problems`` has all, which may be every expert of every layer."""


class CheckpointError(WorkspaceError, ValueError):
    """A folder does not hold the model its config describes; `problems` lists everything that is wrong with it."""

    def __init__(self, problem: str, remedy: str = "", **fields: object) -> None:
        super().__init__(problem, remedy, **fields)
        problems = fields.get("problems")
        self.problems: tuple[str, ...] = tuple(problems) if isinstance(problems, list | tuple) else (problem,)


def listed(path: object, problems: Sequence[str], remedy: str) -> CheckpointError:
    """One error for all problems of one folder."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    text = "".join(f"\n  - {problem}" for problem in problems[:SHOWN])
    if len(problems) > SHOWN:
        text += f"\n  ... and {len(problems) - SHOWN} more: `error.problems` has all"
    return CheckpointError(f"{path} has {count}:{text}", remedy, path=str(path), problems=list(problems))
