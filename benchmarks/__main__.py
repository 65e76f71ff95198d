"""``python -m benchmarks [NAME ...]``: measure, print, write ``benchmarks/results/cpu/NAME.json`` and ``.md``.

Exits with 1 when a target is missed.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure
from workspace.sweep.report import provenance, write_json

NAMES = ("steady_state", "fork_join", "trace_memory", "trace_scale", "model_cost")
APART = ("proof", "kernels", "decode_step", "first_run")
"""Commands of their own, with their own options."""
FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "cpu"


def _about(name: str) -> str:
    """The first line of a benchmark's docstring, without importing it."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


LISTED = "\n\n".join(f"{name}: {_about(name)}" for name in NAMES)
ELSEWHERE = ", ".join(f"python -m benchmarks.{name}" for name in APART)


@click.command(epilog=f"{LISTED}\n\nCommands of their own: {ELSEWHERE}.")
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(NAMES))
@click.pass_context
def main(context: click.Context, names: tuple[str, ...]) -> None:
    """Measure on the CPU, print, and write benchmarks/results/cpu/NAME.json and .md: the named benchmarks, or all.

    Exits with 1 when a target is missed.
    """
    context.exit(run(names or NAMES))


def run(names: tuple[str, ...]) -> int:
    """Run benchmarks; 1 when a target is missed."""
    missed = 0
    for name in names:
        module = import_module(f"benchmarks.{name}")
        figures = module.figures()
        made = provenance()
        _print(name, figures)
        _write(name, module.__doc__ or "", figures, made)
        missed += sum(not figure.met for figure in figures)
    return 1 if missed else 0


def _rows(figures: list[Figure]) -> list[tuple[str, str, str, str]]:
    return [
        (
            figure.name,
            f"{figure.value:,.3f}".rstrip("0").rstrip(".") + f" {figure.unit}",
            "" if figure.limit is None else f"<= {figure.limit:,.3g}",
            "" if figure.limit is None else "met" if figure.met else "missed",
        )
        for figure in figures
    ]


def _print(name: str, figures: list[Figure]) -> None:
    table = Table("figure", "value", "target", "", title=name, title_justify="left")
    for row in _rows(figures):
        table.add_row(*row)
    Console().print(table)


def _write(name: str, about: str, figures: list[Figure], made: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    entries = [attrs.asdict(figure) | {"met": figure.met} for figure in figures]
    write_json({"schema": 1, "made": made, "about": about, "figures": entries}, RESULTS / f"{name}.json")
    origin = f"Made {made['date']} with torch {made['torch']}, commit {made['commit']}."
    lines = [about.strip(), "", origin, ""]
    lines += ["| figure | value | target | |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(figures)]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
