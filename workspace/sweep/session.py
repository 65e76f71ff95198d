"""Find the workload of a replay and open its session."""

from __future__ import annotations

import pkgutil
from typing import Any

from workspace import registry
from workspace.errors import ConfigError, Unsupported
from workspace.setting import nearest
from workspace.sweep.plan import Replay
from workspace.sweep.workload import Session, Workload


def find_workload(name: str) -> Workload:
    """The workload registered under a name, or the class written as ``module:Class``.

    Raises
    ------
    ConfigError
        There is no such workload.
    """
    if ":" in name:
        try:
            return _made(name, pkgutil.resolve_name(name))
        except ConfigError:
            raise
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"there is no workload {name!r}: {error}", "give MODULE:CLASS") from None
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


def _made(name: str, entry: Any) -> Workload:
    workload: Workload = entry()
    missing = [needed for needed in ("drivers", "models") if not hasattr(workload, needed)]
    if missing:
        raise ConfigError(
            f"workload {name!r} has no {', '.join(missing)}",
            "give it what the protocol `Workload` in workspace/sweep/workload.py has",
            key="workload",
            value=name,
            missing=tuple(missing),
        )
    return workload


def open_session(replay: Replay) -> Session:
    """The session a replay asks for, the same in every process.

    Raises
    ------
    Unsupported
        The workload does not run on the driver.
    WorkspaceError
        The workload refuses the model or the trace.
    """
    workload = find_workload(replay.workload)
    if replay.driver not in workload.drivers:
        raise Unsupported(
            f"workload {replay.workload!r} does not run on the {replay.driver!r} driver",
            f"choose --driver {' or '.join(workload.drivers)}",
        )
    return workload.open(replay.model or workload.models[0], replay.trace, replay.seed)
