"""Every strategy keeps every scenario, and each scenario fails with its guard taken out."""

from __future__ import annotations

import pytest

from workspace.testing import Cell, cells


@pytest.mark.parametrize("cell", cells(controls=False), ids=str)
def test_strategy_keeps_scenario(cell: Cell) -> None:
    """Right data under every schedule, nothing from the clock check, and what is refused refused by name."""
    cell.check()


@pytest.mark.parametrize("cell", [cell for cell in cells() if cell.seam], ids=str)
def test_scenario_fails_without_its_guard(cell: Cell) -> None:
    """The negative control: with one fence, edge or guard removed the scenario must fail as it says."""
    cell.check()
