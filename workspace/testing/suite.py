"""The suite as others run it: a report for a strategy, or parameters for pytest."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import attrs
import click

from workspace import registry
from workspace.errors import ArgumentError
from workspace.testing.contract import check_control, check_scenario
from workspace.testing.failure import ContractBroken
from workspace.testing.scenario import Scenario, all_scenarios
from workspace.testing.table import table


@attrs.frozen
class Cell:
    """One scenario under one strategy, whole or (with a seam) as its negative control."""

    scenario: Scenario
    strategy: str
    seam: str = ""
    driver: str = "simulated"

    def __str__(self) -> str:
        return f"{self.scenario.name}-{self.strategy}" + (f"-without-{self.seam}" if self.seam else "")

    def check(self) -> None:
        """Raise `ContractBroken` unless the strategy keeps the scenario, or the control fails as it must."""
        if self.seam:
            check_control(self.scenario, self.strategy, self.seam, self.driver)
        else:
            check_scenario(self.scenario, self.strategy, self.driver)


def cells(
    strategy: str | None = None,
    exempt: Mapping[str, str] | None = None,
    *,
    controls: bool = True,
    driver: str = "simulated",
) -> list[Cell]:
    """What runs on a driver: for `pytest.mark.parametrize("cell", cells(...), ids=str)`.

    Parameters
    ----------
    strategy
        Name of a strategy from an entry point, which runs everything it is not exempt from; omitted, the
        strategies that ship, as their table says.
    exempt
        For such a strategy: scenario -> reason.
    controls
        Whether to include negative controls, which must fail. They take guards out of the library itself; a strategy
        with guards of its own leaves them out.
    driver
        ``"simulated"``, or ``"cuda"`` on a GPU.

    Raises
    ------
    UnknownStrategy
        No strategy of that name is registered: every control would fail, as it must, for the wrong reason.
    ArgumentError
        An exemption is of no scenario, or has no reason.

    Examples
    --------
    >>> @pytest.mark.parametrize("cell", cells("my_strategy"), ids=str)      # doctest: +SKIP
    ... def test_contract(cell):
    ...     cell.check()
    """
    known = all_scenarios()
    if strategy is None:
        found = [Cell(known[name], one, "", driver) for name, one in table().cells(driver)]
        if controls:
            found += [Cell(known[name], one, seam, driver) for name, one, seam in table().controls(driver)]
        return found
    registry.strategy(strategy)
    exempt = exempt or {}
    for name, reason in exempt.items():
        if name not in known:
            raise ArgumentError(f"exemption {name!r}: no such scenario", "name one of all_scenarios()")
        if not reason.strip():
            raise ArgumentError(f"exemption {name!r}: no reason", "say why the strategy need not keep it")
    here = {name for name, _ in table().cells(driver)}
    found = [Cell(one, strategy, "", driver) for name, one in known.items() if name in here and name not in exempt]
    if controls:
        found += [Cell(cell.scenario, strategy, seam, driver) for cell in found for seam in cell.scenario.seams]
    return found


@attrs.frozen
class Report:
    """What a strategy kept and broke; `broken` maps a cell's name to what was found."""

    strategy: str
    kept: tuple[str, ...]
    broken: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.strategy}: {len(self.kept)} kept, {len(self.broken)} broken"]
        return "\n".join(lines + list(self.broken.values()))


def run_contract(
    strategy: str, exempt: Mapping[str, str] | None = None, *, controls: bool = True, driver: str = "simulated"
) -> Report:
    """Run the whole contract for a strategy by name. Parameters as for `cells`.

    An exception that is no `ContractBroken` breaks its cell, too, and the rest still runs. Where the standard error
    stream is a terminal, it gets a line as each cell ends.
    """
    kept: list[str] = []
    broken: dict[str, str] = {}
    everything = cells(strategy, exempt, controls=controls, driver=driver)
    for number, cell in enumerate(everything, 1):
        try:
            cell.check()
            kept.append(str(cell))
        except ContractBroken as error:
            broken[str(cell)] = str(error)
        except Exception as error:
            broken[str(cell)] = _raised(cell, error)
        if sys.stderr is not None and sys.stderr.isatty():
            ended = "broken" if str(cell) in broken else "kept"
            click.echo(f"[{number}/{len(everything)}] {cell}: {ended}", err=True)
    return Report(strategy, tuple(kept), broken)


def _raised(cell: Cell, error: Exception) -> str:
    """Which exception ended a cell, and the innermost line of the strategy's file, if it came by there."""
    factory = registry.strategy(cell.strategy).load()
    file = getattr(sys.modules.get(factory.__module__), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    without = f" without {cell.seam!r}" if cell.seam else ""
    place = f"{Path(line.filename).name}:{line.lineno}"
    return f"{cell.scenario.name} under {cell.strategy!r}{without} raised {type(error).__name__}: {error} at {place}"
