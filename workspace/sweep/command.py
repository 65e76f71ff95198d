"""The command ``workspace sweep``: run the cells, show them, write the report and the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from workspace import registry
from workspace.config import load_config
from workspace.errors import Unsupported
from workspace.sweep.execute import open_execution
from workspace.sweep.pictures import draw_bytes, draw_comparison
from workspace.sweep.plan import Cell, Extent, Replay, cells
from workspace.sweep.report import make_folder, report, write_json
from workspace.sweep.result import Refused, Result
from workspace.sweep.runner import run_cells
from workspace.sweep.session import open_session, steps_of
from workspace.sweep.table import print_results
from workspace.sweep.workload import MODES


def run(
    console: Console,
    replay: Replay,
    names: Sequence[str],
    modes: Sequence[str],
    micro_batches: Sequence[int],
    aux_streams: Sequence[bool],
    jobs: int,
    out: Path,
    allow_refused: bool = False,
    tokens: Sequence[int] = (),
    nvtx: bool = False,
) -> int:
    """Sweep every combination; an empty sequence means all.

    Parameters
    ----------
    allow_refused
        Cells may be refused: by a workload that lacks a mode, say, or for want of capacity.
    tokens
        Sizes of the steps that are timed on a GPU.
    nvtx
        Whether a profiler is to see a range around each lease, on a GPU.

    Returns
    -------
    int
        The exit code: 1 when a strategy that claims to be safe was not judged ``SAFE`` in some cell or computed other
        bits than `caching`, or a cell was refused that may not be, else 0.
    """
    entries = registry.strategies()
    for name, entry in entries.items():
        if entry.unusable and not names:
            click.echo(f"left out: strategy {name!r} {entry.unusable}", err=True)
    names = names or [name for name, entry in entries.items() if not entry.unusable]
    safe = {name: registry.strategy(name).safe for name in names}
    load_config()  # a setting that every cell would refuse is refused once, before any is run
    if replay.driver == "cuda":
        from workspace.sweep import timed_command

        return timed_command.run(
            console, replay, safe, modes or MODES, micro_batches, aux_streams, tokens, out, allow_refused, nvtx
        )
    if tokens:
        raise Unsupported("--tokens with driver 'simulated', which replays the trace's steps", "choose --driver cuda")
    if nvtx:
        raise Unsupported("--nvtx with driver 'simulated', which no profiler sees", "choose --driver cuda")
    session = open_session(replay)
    make_folder(out)
    todo = cells(safe, modes or MODES, micro_batches, aux_streams)
    extent = Extent.of(steps_of(session, replay))
    console.print(session.description)
    console.print(f"replayed: {extent}")
    computed = open_execution(replay).description if replay.schedules else ""
    if computed:
        console.print(f"real numbers: {computed}; {replay.schedules} schedules a cell")

    pictured = todo[0].setting
    replayed = f"{session.description}\nreplayed: {extent}"
    finished = _run_with_progress(console, replay, todo, safe, pictured, jobs)
    results = [finished[cell] for cell in todo]
    measured = [result for result in results if isinstance(result, Result)]
    print_results(console, results, safe, extent.most)

    write_json(report(replay, session.description, extent, computed, results), out / "sweep.json")
    written = ["sweep.json"]
    if any(result.envelope for result in measured):
        draw_bytes(measured, safe, f"Peak bytes, and bytes on loan by owner\n{replayed}", out / "bytes.png")
        written.append("bytes.png")
    if measured:
        title = f"Peak bytes held and host time per step\n{replayed}"
        draw_comparison(measured, safe, title, out / "comparison.png")
        written.append("comparison.png")
    console.print(f"written to {out}: {', '.join(written)}", highlight=False)
    return _verdict(console, results, safe, allow_refused)


def _run_with_progress(
    console: Console,
    replay: Replay,
    todo: Sequence[Cell],
    safe: Mapping[str, bool],
    pictured: tuple[str, int, bool],
    jobs: int,
) -> dict[Cell, Result | Refused]:
    finished: dict[Cell, Result | Refused] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replaying", total=len(todo))
        for result in run_cells(replay, todo, safe, lambda cell: cell.setting == pictured, jobs):
            finished[result.cell] = result
            progress.update(task, advance=1, description=str(result.cell))
    return finished


def _verdict(
    console: Console, results: Sequence[Result | Refused], safe: Mapping[str, bool], allow_refused: bool
) -> int:
    broken = [
        result for result in results if isinstance(result, Result) and safe[result.cell.strategy] and not result.sound
    ]
    for result in broken:
        judged, numbers = result.judgement, result.numbers
        bits = f"; {numbers.equal} of {numbers.schedules} runs have the bits of caching" if numbers else ""
        console.print(f"{result.cell}: {judged.verdict}: {judged.first}{bits}", style="red")
    refused = 0 if allow_refused else sum(isinstance(result, Refused) for result in results)
    if refused:
        console.print(f"{refused} of {len(results)} cells were refused; --allow-refused lets them be", style="red")
    return 1 if broken or refused else 0
