"""The committed table scenario x strategy x driver: what runs, and why the rest does not."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import attrs

from workspace.registry import strategies
from workspace.testing.scenario import all_scenarios

DRIVERS = ("simulated", "cuda")


@attrs.frozen
class Row:
    """One scenario.

    Attributes
    ----------
    runs
        Driver -> strategies it runs under.
    exempt
        Driver -> strategy -> reason.
    uncontrolled
        Strategy -> seam -> why removing it changes nothing there.
    unshown
        Driver -> seam -> why its removal is not looked at there.
    """

    runs: Mapping[str, tuple[str, ...]]
    exempt: Mapping[str, Mapping[str, str]]
    uncontrolled: Mapping[str, Mapping[str, str]]
    unshown: Mapping[str, Mapping[str, str]]


@attrs.frozen
class Table:
    """All rows, and what nothing runs under, with reasons.

    Attributes
    ----------
    rows
        By scenario.
    strategies, drivers
        What no scenario runs under.
    allocators
        Allocator of PyTorch's -> scenario, or cell by its name -> reason why it is left out there, on a GPU.
    """

    rows: Mapping[str, Row]
    strategies: Mapping[str, str]
    drivers: Mapping[str, str]
    allocators: Mapping[str, Mapping[str, str]] = attrs.Factory(dict)

    def cells(self, driver: str) -> list[tuple[str, str]]:
        """(scenario, strategy) of everything that runs on a driver."""
        return [(name, strategy) for name, row in self.rows.items() for strategy in row.runs.get(driver, ())]

    def controls(self, driver: str) -> list[tuple[str, str, str]]:
        """(scenario, strategy, seam) of every control that must fail on a driver."""
        known = all_scenarios()
        return [
            (name, strategy, seam)
            for name, strategy in self.cells(driver)
            for seam in known[name].seams
            if seam not in self.rows[name].uncontrolled.get(strategy, {})
            and seam not in self.rows[name].unshown.get(driver, {})
        ]

    def gaps(self) -> list[str]:
        """What is missing, named twice, unknown, or exempt without a reason."""
        found = [f"scenario {name!r} has no row" for name in all_scenarios() if name not in self.rows]
        found += [f"row {name!r} is no scenario" for name in self.rows if name not in all_scenarios()]
        every = [name for name in strategies() if name not in self.strategies]
        for name, row in self.rows.items():
            for driver in DRIVERS:
                if driver in self.drivers:
                    continue
                runs, exempt = row.runs.get(driver, ()), row.exempt.get(driver, {})
                known = {*runs, *exempt}
                found += [f"{name}: {strategy} is missing on {driver}" for strategy in every if strategy not in known]
                found += [f"{name}: {one} runs and is exempt on {driver}" for one in runs if one in exempt]
                found += [f"{name}: strategy {one!r} is not known" for one in known if one not in every]
            seams = all_scenarios()[name].seams if name in all_scenarios() else ()
            for strategy, reasons in row.uncontrolled.items():
                found += [f"{name}: {seam!r} is none of its seams" for seam in reasons if seam not in seams]
                found += [f"{name}: strategy {strategy!r} is not known" for _ in [0] if strategy not in every]
            for driver, reasons in row.unshown.items():
                found += [f"{name}: {seam!r} is none of its seams" for seam in reasons if seam not in seams]
                found += [f"{name}: driver {driver!r} is not known" for _ in [0] if driver not in DRIVERS]
        cells = {*self.rows, *(f"{name}-{strategy}" for name, strategy in self.cells("cuda"))}
        cells |= {f"{name}-{strategy}-without-{seam}" for name, strategy, seam in self.controls("cuda")}
        for allocator, exempt in self.allocators.items():
            found += [f"{allocator}: {name!r} is no scenario and no cell" for name in exempt if name not in cells]
        return found + [f"{where}: no reason" for where, reason in self._reasons() if not str(reason).strip()]

    def _reasons(self) -> list[tuple[str, str]]:
        found = [*self.strategies.items(), *self.drivers.items()]
        for exempt in self.allocators.values():
            found += exempt.items()
        for name, row in self.rows.items():
            for group in (*row.exempt.values(), *row.uncontrolled.values(), *row.unshown.values()):
                found += [(f"{name}: {key}", reason) for key, reason in group.items()]
        return found


def parse(content: Mapping[str, Any]) -> Table:
    """A table from its TOML."""
    content = dict(content)
    exempt_strategies = content.pop("strategies", {}).get("exempt", {})
    exempt_drivers = content.pop("drivers", {}).get("exempt", {})
    allocators = content.pop("allocators", {})
    rows = {
        name: Row(
            {driver: tuple(row[driver]) for driver in DRIVERS if driver in row},
            row.get("exempt", {}),
            row.get("uncontrolled", {}),
            row.get("unshown", {}),
        )
        for name, row in content.items()
    }
    return Table(rows, exempt_strategies, exempt_drivers, allocators)


@cache
def table() -> Table:
    """The table that ships beside the suite."""
    return parse(tomllib.loads(files("workspace.testing").joinpath("contract.toml").read_text(encoding="utf-8")))
