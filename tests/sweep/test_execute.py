"""Real numbers of a cell, on a workload whose races are known."""

from __future__ import annotations

import attrs
import pytest

from tests.sweep.standin import Sums, SumsProgram
from workspace.errors import DriverError, Unsupported
from workspace.sweep import execute as module
from workspace.sweep.cell import measure
from workspace.sweep.execute import execute, open_execution
from workspace.sweep.plan import Cell, Replay, cells
from workspace.sweep.result import Numbers, Result

REPLAY = Replay("tests.sweep.standin:ThreeLeases", "small", None, "simulated", 2, 0, schedules=4)


def of(workload: str) -> Replay:
    return attrs.evolve(REPLAY, workload=f"tests.sweep.standin:{workload}")


@pytest.mark.parametrize("cell", cells(("caching", "event_fenced", "per_stream"), ["eager"], [1, 2], [True]), ids=str)
def test_safe_strategies_compute_the_bits_of_caching(cell: Cell) -> None:
    assert execute(REPLAY, cell, False) == Numbers(4, 4, 0)


def test_an_unfenced_pool_computes_something_else_with_two_micro_batches() -> None:
    """And the same as `caching` with one."""
    alone, shared = (execute(REPLAY, Cell("unfenced", "eager", parts, True), True) for parts in (1, 2))
    assert alone == Numbers(4, 4, 0)
    assert shared.equal < 4 and not shared.failed


def test_an_operator_that_fails_is_counted_and_the_next_schedule_runs() -> None:
    """Its error is sticky on its device, so each run gets another."""
    assert execute(of("Failing"), Cell("unfenced", "eager", 1, True), True) == Numbers(4, 0, 4)
    assert execute(of("Failing"), Cell("event_fenced", "eager", 1, True), False) == Numbers(4, 4, 0)


def test_an_operator_that_fails_under_a_safe_strategy_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reference it is an error: there is nothing to compare with."""
    cell = Cell("event_fenced", "eager", 1, True)
    assert execute(REPLAY, cell, False).failed == 0

    def failing(self: SumsProgram) -> None:
        raise DriverError("on purpose", "")

    monkeypatch.setattr(SumsProgram, "run", failing)
    assert execute(REPLAY, cell, False) == Numbers(4, 0, 4)
    module._reference.cache_clear()
    with pytest.raises(DriverError, match="on purpose"):
        execute(REPLAY, cell, False)


def test_a_workload_that_cannot_compute_is_refused() -> None:
    with pytest.raises(Unsupported, match="computes no numbers"):
        open_execution(of("Replayed"))
    assert isinstance(open_execution(REPLAY), Sums)


def test_numbers_are_part_of_a_result() -> None:
    """And of the verdict on it."""
    result = measure(REPLAY, Cell("event_fenced", "eager", 2, True), False, False)
    assert isinstance(result, Result) and result.numbers == Numbers(4, 4, 0) and result.sound
    assert not attrs.evolve(result, numbers=Numbers(4, 3, 0)).sound
    plain = measure(attrs.evolve(REPLAY, schedules=0), Cell("event_fenced", "eager", 2, True), False, False)
    assert isinstance(plain, Result) and plain.numbers is None and plain.sound
