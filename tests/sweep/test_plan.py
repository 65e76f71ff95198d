"""Which cells a sweep has, and how they are compared."""

from __future__ import annotations

from workspace.sweep.plan import Cell, cells
from workspace.sweep.result import Bytes, Judgement, Result, host_ratios


def test_cells_are_every_combination_with_rivals_side_by_side() -> None:
    """Every combination appears once, and the strategies of one setting are neighbours."""
    planned = cells(["caching", "unfenced"], ["eager", "full"], [1, 2], [True, False])
    assert len(set(planned)) == len(planned) == 16
    assert all(planned[i].setting == planned[i + 1].setting for i in range(0, 16, 2))


def _result(cell: Cell, host_us: float) -> Result:
    return Result(cell, 1, 1, Bytes(0, 0, 0, {}), {}, {}, host_us, Judgement("SAFE", 0, 0, ""))


def test_host_time_is_compared_within_one_setting() -> None:
    """The ratio is to caching of the same mode, micro-batches and side streams; without it there is none."""
    eager, full = [cells(["caching", "planned"], [mode], [1], [True]) for mode in ("eager", "full")]
    results = [_result(eager[0], 100.0), _result(eager[1], 50.0), _result(full[1], 30.0)]
    assert host_ratios(results) == {eager[0]: 1.0, eager[1]: 0.5}
