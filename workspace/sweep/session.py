"""Find the workload of a replay and open its session."""

from __future__ import annotations

import pkgutil
from functools import cache
from typing import Any

from workspace import registry
from workspace.errors import ConfigError, Unsupported
from workspace.setting import nearest
from workspace.sweep.plan import Cell, Replay
from workspace.sweep.protocol import following
from workspace.sweep.workload import Runner, Session, Step, Workload


def find_workload(name: str) -> Workload:
    """The workload registered under a name, or the class written as ``module:Class``.

    Raises
    ------
    ConfigError
        There is no such workload.
    """
    if ":" in name:
        return _made(name, _imported(name))
    known = registry.workloads()
    if name not in known:
        near = nearest(name, list(known))
        raise ConfigError(
            f"there is no workload {name!r}",
            f"did you mean {near!r}?" if near else f"give MODULE:CLASS, or one of: {', '.join(known)}",
            key="workload",
            value=name,
            near=near,
        )
    return _made(name, known[name])


def _imported(name: str) -> Any:
    """What is written as ``module:Class``."""
    module = name.partition(":")[0]
    try:
        return pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"workload {name!r}: {module!r} imports what is not installed: {error}", "install it"
            ) from None
        raise ConfigError(
            f"workload {name!r} is not importable from here: {error}",
            "`python -m workspace` looks in the current folder: run it in the one that has the module, or install it",
        ) from None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no workload {name!r}: {error}", "give MODULE:CLASS") from None


def _made(name: str, entry: Any) -> Workload:
    try:
        made = entry()
    except TypeError as error:
        remedy = "give MODULE:CLASS, of a class that is made without arguments"
        raise ConfigError(f"there is no workload {name!r}: {error}", remedy) from None
    workload: Workload = following(Workload, made, name, but=("open",))  # which `timed` does without
    return workload


def open_session(replay: Replay) -> Session:
    """The session a replay asks for, the same in every process.

    Raises
    ------
    Unsupported
        The workload does not run on the driver.
    ProtocolError
        It is no `Workload`, or what it opens no `Session`.
    WorkspaceError
        The workload refuses the model or the trace.
    """
    workload = find_workload(replay.workload)
    if replay.driver not in workload.drivers:
        raise Unsupported(
            f"workload {replay.workload!r} does not run on the {replay.driver!r} driver",
            f"choose --driver {' or '.join(workload.drivers)}",
        )
    following(Workload, workload, replay.workload)
    opened = workload.open(replay.model or workload.models[0], replay.trace, replay.seed)
    session: Session = following(Session, opened, replay.workload)
    return session


session_of = cache(open_session)
"""The session of a replay, opened once in each process."""


def steps_of(session: Session, replay: Replay) -> list[Step]:
    """The steps of a replay. Raises `ProtocolError` where they are no `Step`, `ConfigError` where there are none."""
    steps = list(session.steps(replay.steps))
    if not steps:
        raise ConfigError(f"workload {replay.workload!r} has no steps", "have `steps` yield at least one")
    following(Step, steps[0], replay.workload)
    return steps


def prepare(session: Session, ws: Any, replay: Replay, cell: Cell) -> Runner:
    """What a session makes ready on a cell's workspace. Raises `ProtocolError` if that is no `Runner`."""
    made = session.prepare(ws, cell.mode, cell.aux_streams, cell.micro_batches)
    runner: Runner = following(Runner, made, replay.workload)
    return runner
