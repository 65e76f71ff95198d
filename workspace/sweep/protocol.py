"""Whether what a user wrote for the sweep has the members that its protocol asks for."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from workspace.errors import ConfigError


class ProtocolError(ConfigError):
    """A workload, or something that it made, is not what its protocol asks for: every cell would end so."""


def following(protocol: type, made: Any, workload: str, but: Collection[str] = ()) -> Any:
    """What a workload made, if it has every member of a class of `workspace.sweep.workload`.

    Parameters
    ----------
    but
        Members that are not needed here.

    Raises
    ------
    ProtocolError
        Members are missing, or take other arguments; names the class and them.
    """
    own = {name: member for name, member in vars(protocol).items() if not name.startswith("_")}
    asked = [name for name in dict.fromkeys([*protocol.__annotations__, *own]) if name not in but]
    wrong = [f"has no {name!r}" for name in asked if not hasattr(made, name)]
    if not wrong:
        methods = {name: member for name, member in own.items() if name in asked and inspect.isfunction(member)}
        wrong = [f"has another {name!r}: {said}" for name in methods if (said := _other(methods[name], made, name))]
    if wrong:
        raise ProtocolError(
            f"{type(made).__qualname__!r}, as {protocol.__name__} of workload {workload!r}, {', '.join(wrong)}",
            f"docs/workload.md shows a whole workload; `{protocol.__name__}` stands in workspace/sweep/workload.py",
        )
    return made


def _other(method: Any, made: Any, name: str) -> str:
    """Why a method cannot be called as the protocol's; empty if it can."""
    _, *arguments = inspect.signature(method).parameters
    try:
        inspect.signature(getattr(made, name)).bind(*arguments)
    except TypeError as error:
        return f"called with ({', '.join(arguments)}), {error}"
    except ValueError:
        return ""  # a builtin does not say what it takes
    return ""
