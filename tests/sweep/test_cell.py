"""What a cell measures, on a workload whose races are known."""

from __future__ import annotations

import attrs
import pytest

from tests.sweep.standin import LAYERS
from workspace.sweep import runner
from workspace.sweep.cell import DETAIL, measure
from workspace.sweep.plan import Cell, Replay, cells
from workspace.sweep.result import HostCost, Refused, Result
from workspace.sweep.runner import run_cells

REPLAY = Replay("tests.sweep.standin:ThreeLeases", "small", None, "simulated", 4, 0)
SAFE = ("caching", "event_fenced", "per_stream")


def measured(cell: Cell, sampled: bool = False) -> Result:
    result = measure(REPLAY, cell, allow_unsafe=True, sampled=sampled)
    assert isinstance(result, Result), result
    return result


@pytest.mark.parametrize("cell", cells(SAFE, ["eager"], [1, 2], [True, False]), ids=str)
def test_safe_strategies_are_judged_safe(cell: Cell) -> None:
    """No safe strategy lets two accesses race, and every access was looked at."""
    result = measured(cell)
    assert (result.judgement.verdict, result.judgement.races) == ("SAFE", 0)
    accesses_of_a_layer = 1 + 1 + 3
    assert result.judgement.accesses >= result.steps * LAYERS * cell.micro_batches * accesses_of_a_layer


def test_unfenced_races_only_when_micro_batches_share_the_pool() -> None:
    """The unsafe slab is ordered by the model's own joins, until two micro-batches use it at once."""
    alone, shared = (measured(Cell("unfenced", "eager", parts, True)) for parts in (1, 2))
    assert alone.judgement.verdict == "SAFE"
    assert shared.judgement.verdict == "UNSAFE" and shared.judgement.races > 0 and shared.judgement.first


def test_replay_is_counted_without_its_preparation() -> None:
    """Steps, tokens and leases are those of the replay; what was reserved before it is no growth."""
    result = measured(Cell("event_fenced", "eager", 1, False))
    assert result.steps == 4 and result.tokens == sum(16 * (1 + index * 5 % 8) for index in range(4))
    assert result.counters["acquires"] == 4 * LAYERS * 3 and result.counters["growths"] == 0
    assert 0 < result.bytes.peak_allocated <= result.bytes.peak_reserved
    assert set(result.bytes.owners) == {"query", "index", "output"}


def test_moments_show_the_fullest_of_each_step() -> None:
    """The envelope has each step at most bytes on loan; the detail is the start of the largest step."""
    result = measured(Cell("event_fenced", "eager", 1, True), sampled=True)
    assert [sample.step for sample in result.envelope] == [0, 1, 2, 3]
    assert max(sample.allocated for sample in result.envelope) == result.bytes.peak_allocated
    assert {sample.step for sample in result.detail} == {3} and 0 < len(result.detail) <= DETAIL
    assert not measured(Cell("event_fenced", "eager", 1, True)).envelope


def test_refusal_is_a_result() -> None:
    """A typed error in a cell becomes that cell's result, with its remedy."""
    refused = measure(REPLAY, Cell("caching", "wide", 1, True), False, False)
    assert refused == Refused(refused.cell, "no wide regions here", "choose another mode")


def test_a_refusal_of_what_is_timed_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the judged replay went well; the cells beside it have their times."""
    todo = cells(["caching", "event_fenced"], ["eager"], [1], [True])
    refused = Refused(todo[1], "no time", "take some")
    costs = {todo[0]: HostCost(2.0, (2.0, 3.0, 4.0), 2.5), todo[1]: refused}
    monkeypatch.setattr(runner, "host_costs", lambda *_: costs)
    first, second = run_cells(REPLAY, todo, dict.fromkeys(SAFE, True), lambda cell: False, 1)
    assert isinstance(first, Result) and second == refused
    assert (first.host_us, first.host_replays_us, first.host_again_us) == (2.0, (2.0, 3.0, 4.0), 2.5)


def test_worker_processes_measure_the_same() -> None:
    """Two processes give what one gives, but for the time."""
    todo = cells(["caching", "event_fenced"], ["eager"], [2], [True])
    safe = dict.fromkeys(("caching", "event_fenced"), True)

    def untimed(jobs: int) -> list[object]:
        found = run_cells(REPLAY, todo, safe, lambda cell: False, jobs)
        results = [result for result in found if isinstance(result, Result) and result.host_us > 0]
        assert len(results) == len(todo)
        assert all(bool(one.host_again_us) == (one.cell.strategy == "caching") for one in results)
        return sorted(
            (attrs.evolve(one, host_us=0.0, host_replays_us=(), host_again_us=None) for one in results), key=str
        )

    assert untimed(1) == untimed(2)
