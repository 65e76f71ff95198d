"""Every strategy keeps every scenario, and each scenario fails with its guard taken out."""

from __future__ import annotations

import pytest

from workspace.testing import Cell, cells

BROKEN: dict[str, str] = {
    "i2-too-large-caching": "the simulated device lets the host's error through",
    "i2-too-large-event_fenced": "the simulated device lets the host's error through",
    "i2-too-large-per_stream": "the simulated device lets the host's error through",
}
"""Cells that a defect keeps from passing. Strict: the entry goes with the defect."""


def _parameters(controls: bool) -> list[object]:
    found: list[object] = []
    for cell in cells():
        if bool(cell.seam) == controls:
            reason = BROKEN.get(str(cell))
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            found.append(pytest.param(cell, id=str(cell), marks=marks))
    return found


@pytest.mark.parametrize("cell", _parameters(controls=False))
def test_strategy_keeps_scenario(cell: Cell) -> None:
    """Right data under every schedule, a SAFE verdict, and what is refused refused by name."""
    cell.check()


@pytest.mark.parametrize("cell", _parameters(controls=True))
def test_scenario_fails_without_its_guard(cell: Cell) -> None:
    """The negative control: with one fence, edge or guard removed the scenario must fail as it says."""
    cell.check()
