"""The table of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from workspace.sweep.result import Refused, Result, host_ratios

COLOURS = {"SAFE": "green", "UNSAFE": "bold red", "UNKNOWN": "yellow"}
VERBS = {"record": "record", "wait": "wait", "alloc": "alloc", "replay": "graph_launch"}
"""Column and the driver's verb that it counts."""
MIB = 1 << 20
CAPTION = (
    "on loan, held: peak MiB by leases and from the device; a pool holds what was reserved for the largest step. "
    f"fences, elided, {', '.join(VERBS)}: per step. host us: CPU time per step, without the operations themselves."
)


def result_table(results: Sequence[Result | Refused], safe: Mapping[str, bool]) -> Table:
    """A row for each cell, in sections of cells to be compared with each other.

    Bytes are peaks in MiB; fences, elided fences and driver calls are per step; growths, races and checked
    accesses are of the whole replay.
    """
    table = Table(pad_edge=False, collapse_padding=True, caption=CAPTION, caption_justify="left")
    for heading in ("mode", "mb", "aux", "strategy"):
        table.add_column(heading, no_wrap=True)
    for heading in ("on loan", "held", "fences", "elided", "growths", *VERBS, "host us", "x caching"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("verdict", "races / accesses"):
        table.add_column(heading, no_wrap=True)
    ratios = host_ratios([result for result in results if isinstance(result, Result)])
    setting = None
    for result in results:
        cell = result.cell
        if setting not in (None, cell.setting):
            table.add_section()
        setting = cell.setting
        name = cell.strategy if safe[cell.strategy] else f"{cell.strategy} (unsafe)"
        front = (cell.mode, str(cell.micro_batches), "on" if cell.aux_streams else "off", name)
        if isinstance(result, Refused):
            table.add_row(*front, *[""] * 11, Text("refused"), Text(result.problem))
            continue
        ratio = f"{ratios[cell]:.2f}" if cell in ratios else ""
        table.add_row(*front, *_figures(result), ratio, *_verdict(result))
    return table


def _figures(result: Result) -> tuple[str, ...]:
    steps, counters = result.steps, result.counters
    return (
        f"{result.bytes.peak_allocated / MIB:,.1f}",
        f"{result.bytes.peak_reserved / MIB:,.1f}",
        f"{counters['fences'] / steps:,.1f}",
        f"{counters['elided'] / steps:,.1f}",
        f"{counters['growths']}",
        *(f"{result.driver_calls.get(verb, 0) / steps:,.1f}" for verb in VERBS.values()),
        f"{result.host_us:,.0f}",
    )


def _verdict(result: Result) -> tuple[Text, Text]:
    judged = result.judgement
    return Text(judged.verdict, COLOURS[judged.verdict]), Text(f"{judged.races:,} / {judged.accesses:,}")
