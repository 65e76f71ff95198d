"""The table of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from workspace.sweep.plan import name_of
from workspace.sweep.result import Refused, Result, host_ratios, repeated_ratios

COLOURS = {"SAFE": "green", "UNSAFE": "bold red", "UNKNOWN": "yellow"}
MIB = 1 << 20
FULL_WIDTH = 142
"""Columns of a terminal from which on every figure is shown; the JSON has all of them in any case."""
RACES = "racing pairs /\naccesses"
BROKEN, RETURNING = ("wide", "narrow"), ("caching", "upstream")
"""Modes whose graphs have eager breaks, and strategies whose tensors are the framework allocator's."""
CONTROL = "unfenced"
"""The strategy whose races show that two micro-batches were beside each other."""


@attrs.frozen
class Figure:
    """A column of figures.

    Attributes
    ----------
    heading, value
        Its name, and its text for a result.
    always
        Whether a narrow terminal shows it too.
    """

    heading: str
    value: Callable[[Result], str]
    always: bool = False


def _per_step(count: Callable[[Result], int]) -> Callable[[Result], str]:
    return lambda result: f"{count(result) / result.steps:,.1f}"


def _calls(heading: str, verb: str) -> Figure:
    return Figure(heading, _per_step(lambda result: result.driver_calls.get(verb, 0)))


FIGURES = (
    Figure("on loan", lambda result: f"{result.bytes.peak_allocated / MIB:,.1f}", True),
    Figure("held", lambda result: f"{result.bytes.peak_reserved / MIB:,.0f}", True),
    Figure("fences", _per_step(lambda result: result.counters["fences"]), True),
    Figure("elided", _per_step(lambda result: result.counters["elided"])),
    Figure("growths", lambda result: str(result.counters["growths"])),
    _calls("record", "record"),
    _calls("wait", "wait"),
    _calls("alloc", "alloc"),
    _calls("replay", "graph_launch"),
    Figure("host us", lambda result: f"{result.host_us:,.0f}", True),
)
ABOUT = (
    ("x1", "x1, x2: micro-batches."),
    (
        "held",
        "on loan, held: peak MiB by leases, and from the device, where a pool holds what was declared, for the largest "
        "step that may come; {largest:,} tokens is the largest here.",
    ),
    (
        "breaks",
        "In wide and narrow the tensors of each eager break stay allocated as long as its graph; those of a pool share "
        "bytes, those of caching and upstream do not, and every size that is captured adds its own.",
    ),
    ("fences", "fences: per step."),
    ("elided", "elided: uses on other streams that needed no fence, per step."),
    ("record", "record, wait, alloc, replay: driver calls per step."),
    (
        "host us",
        "host us: CPU time per step, without the operations themselves: each step's least of three replays, which the "
        "setting's strategies take in turn.",
    ),
    ("ratio", "ratio: to caching in the same setting."),
    ("bits", "bits: schedules under which real numbers are those of caching, bit for bit, of all that were tried."),
    (
        RACES,
        "racing pairs / accesses: pairs that no edge orders, where one access may be in many, beside the number of "
        "accesses.",
    ),
    ("(!)", "(!): not a safe strategy."),
)
"""What a heading means, for those that the table has."""


def print_results(
    console: Console, results: Sequence[Result | Refused], safe: Mapping[str, bool], largest: int
) -> None:
    """A row for each cell, in sections of cells to be compared with each other.

    Parameters
    ----------
    largest
        Tokens of the largest step.
    """
    wide = console.width >= FULL_WIDTH
    figures = [figure for figure in FIGURES if figure.always or wide]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("setting", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    for heading in (*(figure.heading for figure in figures), "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    executed = any(isinstance(result, Result) and result.numbers for result in results)
    if executed:
        table.add_column("bits", justify="right", no_wrap=True)
    if wide:
        table.add_column(RACES, justify="right", no_wrap=True)
    measured = [result for result in results if isinstance(result, Result)]
    ratios = host_ratios(measured)
    setting = None
    for result in results:
        cell = result.cell
        if cell.setting != setting and setting is not None:
            table.add_section()
        name = cell.strategy if safe[cell.strategy] else f"{cell.strategy} (!)"
        front = ("" if cell.setting == setting else name_of(cell.setting), name)
        setting = cell.setting
        if isinstance(result, Refused):
            table.add_row(*front, *[""] * (len(figures) + 1), Text("refused"))
            continue
        ratio = f"{ratios[cell]:.2f}" if cell in ratios else ""
        judged = result.judgement
        races = [f"{judged.races:,} / {judged.accesses:,}"] if wide else []
        values = [figure.value(result) for figure in figures]
        bits = [_bits(result)] if executed else []
        table.add_row(*front, *values, ratio, Text(judged.verdict, COLOURS[judged.verdict]), *bits, *races)
    console.print(table)
    shown = {"x1", "(!)", *(str(column.header) for column in table.columns)}
    if any(one.cell.mode in BROKEN and one.cell.strategy in RETURNING for one in measured):
        shown.add("breaks")
    about = " ".join(about for heading, about in ABOUT if heading in shown)
    console.print(about.format(largest=largest), style="dim")
    if own := repeated_ratios(measured):
        several = f"{min(own):.2f} to {max(own):.2f} in {len(own)} settings" if len(own) > 1 else f"{own[0]:.2f}"
        console.print(f"caching timed twice, in turn like the others: ratio to itself {several}.", highlight=False)
    for line in _cautions(measured, safe):
        console.print(line, highlight=False)
    refused = (result for result in results if isinstance(result, Refused))
    for problem, remedy in dict.fromkeys((result.problem, result.remedy) for result in refused):
        console.print(f"refused: {problem}{f'; {remedy}' if remedy else ''}", markup=False, highlight=False)


def _cautions(results: Sequence[Result], safe: Mapping[str, bool]) -> list[str]:
    """What a verdict ``SAFE`` in the table does not mean."""
    found = [result.cell for result in results if result.judgement.verdict == "SAFE"]
    lines = []
    if not all(safe[cell.strategy] for cell in found):
        lines.append("SAFE of a strategy marked (!) holds for this topology only: it orders nothing itself.")
    beside = [cell.setting for cell in found if cell.strategy == CONTROL and cell.micro_batches > 1]
    if beside:
        settings = ", ".join(map(name_of, beside))
        lines.append(
            f"note: the control {CONTROL!r} was SAFE in {settings}: micro-batches share its bytes. Are they on streams "
            "of their own?"
        )
    return lines


def _bits(result: Result) -> Text:
    numbers = result.numbers
    if numbers is None:
        return Text("")
    return Text(f"{numbers.equal}/{numbers.schedules}", "green" if numbers.equal == numbers.schedules else "bold red")
