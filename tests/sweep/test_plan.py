"""Which cells a sweep has, and how they are compared."""

from __future__ import annotations

from workspace.sweep.plan import Cell, Extent, cells, name_of
from workspace.sweep.result import Bytes, Judgement, Result, host_ratios
from workspace.sweep.workload import Step


def test_cells_are_every_combination_with_rivals_side_by_side() -> None:
    """Every combination appears once, and the strategies of one setting are neighbours."""
    planned = cells(["caching", "unfenced"], ["eager", "full"], [1, 2], [True, False])
    assert len(set(planned)) == len(planned) == 16
    assert all(planned[i].setting == planned[i + 1].setting for i in range(0, 16, 2))


def test_a_setting_has_a_short_name() -> None:
    """In which side streams are told by their absence."""
    assert [name_of((mode, 2, aux)) for mode, aux in (("eager", True), ("full", False))] == [
        "eager x2",
        "full x2 serial",
    ]


def _result(cell: Cell, host_us: float) -> Result:
    return Result(cell, 1, 1, Bytes(0, 0, 0, {}), {}, {}, host_us, Judgement("SAFE", 0, 0, ""))


def test_host_time_is_compared_within_one_setting() -> None:
    """The ratio is to caching of the same mode, micro-batches and side streams; without it there is none."""
    eager, full = [cells(["caching", "planned"], [mode], [1], [True]) for mode in ("eager", "full")]
    results = [_result(eager[0], 100.0), _result(eager[1], 50.0), _result(full[1], 30.0)]
    assert host_ratios(results) == {eager[0]: 1.0, eager[1]: 0.5}


def test_what_is_replayed_is_told_in_words() -> None:
    """Decode rows alone are recognised by their sizes, and by the word none."""
    decoding = [Step(index, 28, 0, 28, 28) for index in range(3)]
    prefill = Step(3, 8192, 8164, 28, 29)
    assert str(Extent.of(decoding)) == "3 steps of 28 tokens, none with a prefill"
    assert str(Extent.of(decoding[:1])) == "1 step of 28 tokens, none with a prefill"
    assert str(Extent.of([*decoding, prefill])) == "4 steps of 28 to 8,192 tokens, 1 with a prefill"
