"""The suite as others run it: a report for a strategy, or parameters for pytest."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

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

    def __str__(self) -> str:
        return f"{self.scenario.name}-{self.strategy}" + (f"-without-{self.seam}" if self.seam else "")

    def check(self) -> None:
        """Raise `ContractBroken` unless the strategy keeps the scenario, or the control fails as it must."""
        if self.seam:
            check_control(self.scenario, self.strategy, self.seam)
        else:
            check_scenario(self.scenario, self.strategy)


def cells(strategy: str | None = None, exempt: Mapping[str, str] | None = None, *, controls: bool = True) -> list[Cell]:
    """What runs on the simulated device: for `pytest.mark.parametrize("cell", cells(...), ids=str)`.

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
        found = [Cell(known[name], one) for name, one in table().cells("simulated")]
        if controls:
            found += [Cell(known[name], one, seam) for name, one, seam in table().controls("simulated")]
        return found
    registry.strategy(strategy)
    exempt = exempt or {}
    for name, reason in exempt.items():
        if name not in known:
            raise ArgumentError(f"exemption {name!r}: no such scenario", "name one of all_scenarios()")
        if not reason.strip():
            raise ArgumentError(f"exemption {name!r}: no reason", "say why the strategy need not keep it")
    found = [Cell(one, strategy) for name, one in known.items() if name not in exempt]
    if controls:
        found += [Cell(cell.scenario, strategy, seam) for cell in found for seam in cell.scenario.seams]
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


def run_contract(strategy: str, exempt: Mapping[str, str] | None = None, *, controls: bool = True) -> Report:
    """Run the whole contract for a strategy by name. Parameters as for `cells`."""
    kept: list[str] = []
    broken: dict[str, str] = {}
    for cell in cells(strategy, exempt, controls=controls):
        try:
            cell.check()
            kept.append(str(cell))
        except ContractBroken as error:
            broken[str(cell)] = str(error)
    return Report(strategy, tuple(kept), broken)
