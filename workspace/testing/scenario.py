"""Scenarios: what every strategy must pass, by the ids of the contract."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Literal

import attrs

from workspace.testing.bench import Bench

Promise = Literal["P", "D", "R"]
"""Right data, bit for bit; detected and reported; refused with a typed error."""
Evidence = Literal["corruption", "bytes", "race", "failure"]
"""Wrong bytes and an UNSAFE verdict; wrong bytes only; the verdict only; a requirement not met."""

MODULES = (
    "streams", "forks", "windows", "views", "captures", "inside", "failures", "foreign", "breaks", "edges", "lanes",
    "locks", "growth", "threads", "sizes", "devices", "contents", "processes", "budget", "staging", "sleep",
)  # fmt: skip
"""Modules of `workspace.testing.scenarios`, by kind."""


@attrs.frozen
class Scenario:
    """One scenario.

    Attributes
    ----------
    name
        Its id, and after a dash what this variation is about.
    promise
        What it shows.
    run
        Called with a `Bench`; raises when the contract is broken.
    seams
        Names of `workspace.testing.seams`: with any one of them removed, the scenario must fail.
    evidence
        How it must fail then.
    no_control
        Why there is no guard to remove, for a scenario without seams.
    real, virtual
        Whether it runs on real bytes under schedules, and at true sizes on virtual ones.
    """

    name: str
    promise: Promise
    run: Callable[[Bench], None]
    seams: tuple[str, ...]
    evidence: Evidence
    no_control: str
    real: bool
    virtual: bool

    @property
    def id(self) -> str:
        """The contract's own id: ``a1`` for ``a1-default-stream``."""
        return self.name.split("-")[0]


_SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str,
    promise: Promise,
    *seams: str,
    evidence: Evidence = "corruption",
    no_control: str = "",
    real: bool = True,
    virtual: bool = True,
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Register a function as a scenario. A P or D scenario has seams, or says why it has none."""

    def register(run: Callable[[Bench], None]) -> Callable[[Bench], None]:
        if name in _SCENARIOS:
            raise ValueError(f"scenario {name!r} exists: {_SCENARIOS[name].run}")
        if promise != "R" and not seams and not no_control:
            raise ValueError(f"scenario {name!r} has neither a control nor a reason for having none")
        _SCENARIOS[name] = Scenario(name, promise, run, seams, evidence, no_control, real, virtual)
        return run

    return register


def all_scenarios() -> dict[str, Scenario]:
    """All scenarios by name."""
    for module in MODULES:
        import_module(f"workspace.testing.scenarios.{module}")
    return dict(_SCENARIOS)
