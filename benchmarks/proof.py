"""``python -m benchmarks.proof``: real numbers of DeepSeek-V4's decoder under many schedules, cell by cell.

A cell is a safe strategy, a run mode, side streams or none, one or two micro-batches. A small model runs its script
under 50 seeded schedules; tokens and logits must have the bits of `caching` in the same mode, run in the program's
order. In the first part of a cell the clock check looks at every access and must find no race: it judges what was
enqueued, whatever the schedule. Controls, an unfenced pool under two micro-batches, must fail.

The report is written after each part of a cell; a part that is in it, made from the same sources, is not run again.
Exits with 1 unless everything was run and is as it must be.
"""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import click
import orjson
import torch

from dsv4.model.execution import Execution
from workspace.simulated import InOrder, Random
from workspace.sweep.execute import Bits, compute
from workspace.sweep.plan import REFERENCE, Cell
from workspace.sweep.report import provenance, write_json
from workspace.sweep.workload import MODES

ROOT = Path(__file__).parents[1]
REPORT = Path(__file__).parent / "results" / "cpu" / "proof.json"
SAFE = ("caching", "event_fenced", "per_stream")
CONTROL = "unfenced"
PART = 25
"""Schedules of a part, which share a device and the graphs captured on it."""

Record = dict[str, Any]


@attrs.frozen
class Part:
    """Some schedules of a cell."""

    cell: Cell
    first: int
    count: int

    @property
    def key(self) -> Record:
        """What a record of it begins with."""
        return {"cell": attrs.asdict(self.cell), "first_seed": self.first, "seeds": self.count}


def parts(seeds: int) -> list[Part]:
    """All parts of the proof, the controls last; parts that share a reference are neighbours."""
    cells = [
        Cell(strategy, mode, micro_batches, aux)
        for mode, aux, micro_batches, strategy in product(MODES, (True, False), (1, 2), SAFE)
    ]
    cells += [Cell(CONTROL, mode, 2, True) for mode in MODES]
    return [Part(cell, first, min(PART, seeds - first)) for cell in cells for first in range(0, seeds, PART)]


@cache
def _execution() -> Execution:
    return Execution()


@cache
def _reference(setting: tuple[str, int, bool]) -> Bits:
    runs = compute(_execution(), Cell(REFERENCE, *setting), [InOrder()], False)
    if runs.error is not None:
        raise runs.error
    return runs.bits[0]


def run(part: Part) -> Record:
    """A part's record: how many schedules gave the reference's bits, and what the clock check says if it looked."""
    expected = _reference(part.cell.setting)
    began = time.process_time()
    schedules = [Random(part.first + index) for index in range(part.count)]
    runs = compute(_execution(), part.cell, schedules, part.cell.strategy == CONTROL, judged=not part.first)
    return part.key | {
        "equal": sum(bits == expected for bits in runs.bits),
        "verdict": runs.verdict,
        "races": len(runs.races),
        "error": "" if runs.error is None else runs.error.problem,
        "cpu_seconds": round(time.process_time() - began, 2),
    }


def as_it_must_be(record: Record) -> bool:
    """All bits and no race; of a control the contrary."""
    control = record["cell"]["strategy"] == CONTROL
    verdict = "UNKNOWN" if record["first_seed"] else "UNSAFE" if control else "SAFE"
    return record["verdict"] == verdict and (record["equal"] == record["seeds"]) is not control


def sources() -> dict[str, str]:
    """Git's name for each package the records depend on, ``-dirty`` where the tree differs from it."""
    found = {}
    for package in ("workspace", "dsv4"):
        tree = _git("rev-parse", f"HEAD:{package}")
        found[package] = tree + ("-dirty" if _git("status", "--porcelain", "--", package) else "")
    return found


def _git(*command: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True).stdout.strip()


def known_records(path: Path, made_from: dict[str, str]) -> list[Record]:
    """Records of an earlier run of the same, clean sources."""
    if not path.exists() or any(name.endswith("-dirty") for name in made_from.values()):
        return []
    report = orjson.loads(path.read_bytes())
    records: list[Record] = report["records"] if report["sources"] == made_from else []
    return records


def _settle() -> None:
    """One thread, and nothing of what was imported is walked by the collector again."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def run_all(todo: list[Part], jobs: int, until: float) -> Iterator[Record]:
    """Records as they finish; nothing is begun after the clock reads `until`."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=_settle)
    try:
        for future in as_completed([pool.submit(run, part) for part in todo], max(0.0, until - time.monotonic())):
            yield future.result()
    except TimeoutError:
        return
    finally:
        pool.shutdown(cancel_futures=True)


def report(seeds: int, made_from: dict[str, str], made: dict[str, Any], records: list[Record]) -> dict[str, Any]:
    """The report, in the order of the parts; what is missing is named."""
    by_key = {_name(record): record for record in records}
    planned = parts(seeds)
    kept = [by_key[_name(part.key)] for part in planned if _name(part.key) in by_key]
    missing = [part.key for part in planned if _name(part.key) not in by_key]
    return {
        "schema": 1,
        "made": made,
        "sources": made_from,
        "about": _execution().description,
        "seeds_a_cell": seeds,
        "schedules": sum(record["seeds"] for record in kept),
        "as_they_must_be": sum(map(as_it_must_be, kept)),
        "parts": len(planned),
        "missing": missing,
        "records": kept,
    }


def summary(report: dict[str, Any]) -> str:
    """The report as a table: of each strategy and run mode, how many schedules gave the bits of the reference."""
    made, missing = report["made"], len(report["missing"])
    lines = [
        (__doc__ or "").strip(),
        "",
        f"Made {made['date']} with torch {made['torch']}, commit {made['commit']}: {report['about']}.",
        f"{report['schedules']} schedules; {missing} of {report['parts']} parts are missing.",
        "",
        "| strategy | " + " | ".join(MODES) + " | clock check |",
        "|---" * (len(MODES) + 2) + "|",
    ]
    for strategy in (*SAFE, CONTROL):
        own = [record for record in report["records"] if record["cell"]["strategy"] == strategy]
        counts = []
        for mode in MODES:
            some = [record for record in own if record["cell"]["mode"] == mode]
            counts.append(f"{sum(one['equal'] for one in some)} of {sum(one['seeds'] for one in some)}")
        verdicts = ", ".join(sorted({record["verdict"] for record in own if not record["first_seed"]})) or "-"
        lines.append(f"| {strategy} | " + " | ".join(counts) + f" | {verdicts} |")
    return "\n".join(lines) + "\n"


def _name(record: Record) -> str:
    return str([record["cell"], record["first_seed"], record["seeds"]])


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), default=50, show_default=True, help="Schedules of each cell.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Worker processes.")
@click.option("--minutes", type=float, default=60.0, show_default=True, help="Begin nothing after so long.")
@click.option("--out", type=click.Path(path_type=Path), default=REPORT, show_default=True)
def main(seeds: int, jobs: int, minutes: float, out: Path) -> None:
    """Run what the report lacks."""
    until = time.monotonic() + 60 * minutes
    made, made_from = provenance(), sources()
    records = known_records(out, made_from)
    done = {_name(record) for record in records}
    todo = [part for part in parts(seeds) if _name(part.key) not in done]
    click.echo(f"{len(done)} parts are in {out}, {len(todo)} are to run")
    out.parent.mkdir(parents=True, exist_ok=True)
    for record in run_all(todo, jobs, until):
        records.append(record)
        if not as_it_must_be(record):
            click.echo(f"not as it must be: {record}")
        write_json(report(seeds, made_from, made, records), out)
    final = report(seeds, made_from, made, records)
    write_json(final, out)
    out.with_suffix(".md").write_text(summary(final), encoding="utf-8")
    click.echo(
        f"{final['as_they_must_be']} of {final['parts']} parts are as they must be; {final['schedules']} schedules"
    )
    sys.exit(0 if final["as_they_must_be"] == final["parts"] else 1)


if __name__ == "__main__":
    main()
