"""The table shows every cell, at any width."""

from __future__ import annotations

from io import StringIO

import attrs
import pytest
from rich.console import Console

from workspace.sweep.plan import Cell
from workspace.sweep.result import Bytes, Judgement, Numbers, Refused, Result
from workspace.sweep.table import FULL_WIDTH, print_results

CALLS = {"record": 5270, "wait": 6520, "alloc": 28_200, "graph_launch": 10}
COUNTS = {"acquires": 90, "fences": 15, "elided": 25, "growths": 3}


def result(strategy: str, host_us: float, verdict: str) -> Result:
    judgement = Judgement(verdict, 13_007 if verdict == "UNSAFE" else 0, 113_026, "")
    cell = Cell(strategy, "overflow", 2, True)
    held = Bytes(1777 << 20, 26_582 << 20, 0, {})
    return Result(cell, 10, 640, held, COUNTS, CALLS, host_us, judgement)


MEASURED = [result("caching", 80_000.0, "SAFE"), result("unfenced", 20_000.0, "UNSAFE")]
REFUSED = Refused(Cell("caching", "wide", 2, True), "no wide regions here", "choose another mode")


def printed(width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    print_results(console, [*MEASURED, REFUSED], {"caching": True, "unfenced": False}, 2126)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_wide_table_has_every_figure() -> None:
    """Peaks in MiB, counts per step, the ratio to caching, and the verdict with races and accesses."""
    line = next(line for line in printed(FULL_WIDTH) if "unfenced" in line)
    figures = "1,777.0 26,582 1.5 2.5 3 527.0 652.0 2,820.0 1.0 20,000 0.25 UNSAFE 13,007 / 113,026"
    assert line.split() == ["unfenced", "(!)", *figures.split()]


@pytest.mark.parametrize("width", [80, 100, FULL_WIDTH])
def test_no_figure_is_cut(width: int) -> None:
    """Rows keep strategy, bytes, host time and verdict whole, down to 80 columns."""
    lines = printed(width)
    assert not any("…" in line for line in lines) and all(len(line) <= width for line in lines)
    assert any(line.split()[:2] == ["overflow", "x2"] and "80,000" in line and "SAFE" in line for line in lines)


@pytest.mark.parametrize("width", [80, 100, FULL_WIDTH])
def test_real_numbers_have_a_column(width: int) -> None:
    """How many schedules gave the bits of `caching`; it fits the narrowest table, too."""
    computed = [attrs.evolve(one, numbers=Numbers(20, 20 * (one.cell.strategy == "caching"), 0)) for one in MEASURED]
    console = Console(file=StringIO(), width=width)
    print_results(console, [*computed, REFUSED], {"caching": True, "unfenced": False}, 2126)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert not any("…" in line for line in lines) and all(len(line) <= width for line in lines)
    bits = [next(line for line in lines if name in line and "SAFE" in line).split() for name in ("caching", "unfenced")]
    assert "20/20" in bits[0] and "0/20" in bits[1] and any("bit for bit" in line for line in lines)
    assert not any("bit for bit" in line for line in printed(width))


@pytest.mark.parametrize("width", [80, FULL_WIDTH])
def test_the_legend_explains_what_is_shown_and_nothing_else(width: int) -> None:
    """Columns that a narrow table leaves out are not explained below it."""
    text = " ".join(" ".join(printed(width)).split())
    narrow = ("x1, x2:", "on loan, held:", "fences:", "host us:", "ratio:", "(!):")
    wide = ("elided:", "record, wait, alloc, replay:", "racing pairs / accesses:")
    assert all(about in text for about in narrow)
    assert [about in text for about in wide] == [width == FULL_WIDTH] * len(wide)


def below(*results: Result | Refused) -> str:
    console = Console(file=StringIO(), width=400)
    print_results(console, results, {"caching": True, "unfenced": False, "upstream": False}, 2126)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_caching_against_itself_says_how_good_a_ratio_is() -> None:
    """Over the settings that have it; without it nothing is said."""
    one, other = result("caching", 100.0, "SAFE"), attrs.evolve(result("caching", 50.0, "SAFE"), host_again_us=60.0)
    assert "to itself" not in below(one)
    assert "caching timed twice, in turn like the others: ratio to itself 1.20." in below(other)
    full = attrs.evolve(one, cell=Cell("caching", "full", 1, True), host_again_us=97.0)
    assert "ratio to itself 0.97 to 1.20 in 2 settings." in below(other, full)


def test_bytes_held_are_put_into_proportion() -> None:
    """By the largest step's size; and by what eager breaks keep, where a strategy lends the allocator's tensors."""
    kept = "In wide and narrow the tensors of each eager break stay allocated"
    caching, pool = result("caching", 1.0, "SAFE"), result("unfenced", 1.0, "SAFE")
    narrow = attrs.evolve(caching, cell=Cell("caching", "narrow", 2, True))
    assert "2,126 tokens is the largest here" in below(caching) and kept not in below(caching)
    assert kept in below(narrow)
    assert kept not in below(attrs.evolve(pool, cell=Cell("unfenced", "narrow", 2, True)), REFUSED)


def test_safe_of_a_strategy_that_orders_nothing_is_put_into_proportion() -> None:
    """Only where such a cell is SAFE."""
    caution = "SAFE of a strategy marked (!) holds for this topology only"
    assert caution in below(result("caching", 1.0, "SAFE"), result("upstream", 1.0, "SAFE"))
    assert caution not in below(result("caching", 1.0, "SAFE"), result("upstream", 1.0, "UNSAFE"), REFUSED)


def test_a_control_that_shows_nothing_is_a_question() -> None:
    """Where two micro-batches were asked for; one alone orders itself."""
    control = result("unfenced", 1.0, "SAFE")
    alone = attrs.evolve(control, cell=Cell("unfenced", "full", 1, True))
    text = below(control, alone)
    assert "note: the control 'unfenced' was SAFE in overflow x2:" in text and "streams of their own?" in text
    for others in ([alone], [result("unfenced", 1.0, "UNSAFE")], [result("upstream", 1.0, "SAFE")]):
        assert "note:" not in below(*others)


def test_refusal_is_named() -> None:
    """A refused cell says so in its row, and why below the table, with what to do."""
    lines = printed(80)
    assert any("wide x2" in line and "refused" in line for line in lines)
    assert "refused: no wide regions here; choose another mode" in lines
    assert "refused: no wide regions here\n" in below(attrs.evolve(REFUSED, remedy=""))
