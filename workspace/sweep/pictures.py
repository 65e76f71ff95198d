"""Pictures of a sweep: peak bytes, and over time by owner; and strategies compared by bytes and host time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from workspace.sweep.plan import name_of
from workspace.sweep.result import Result, Sample

matplotlib.use("Agg")
from matplotlib import pyplot

# Okabe and Ito's palette: told apart with any common colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
SHAPES = ("o", "s", "D", "^", "v", "P", "h")
GREY, INK, RED = "#BBBBBB", "#222222", "#C00000"
OTHERS = "other owners"
EDGES = {"SAFE": INK, "UNSAFE": RED, "UNKNOWN": GREY}
MIB, GIB = 1 << 20, 1 << 30
ENTRY, LETTERS = 1.6, 11
"""Width of a legend's entry in inches, and letters of a title in an inch, with room to spare."""

STYLE: Any = {
    "figure.dpi": 130,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def batches(parts: int) -> str:
    """How many micro-batches, in words."""
    return f"{parts} micro-batch{'es' if parts > 1 else ''}"


def marked(name: str, safe: bool) -> str:
    """A strategy's name as pictures and tables show it."""
    return name if safe else f"{name} (!)"


def draw_bytes(results: Sequence[Result], safe: Mapping[str, bool], title: str, path: Path) -> None:
    """Peak bytes of every cell, and bytes on loan by owner of those that have samples; ``(!)`` is no safe strategy.

    Top: held from the device, and on loan. Below, a row for strategies that lend alike: each step at its moment of most
    bytes on loan, and the start of the step with most tokens.
    """
    rows = _alike([result for result in results if result.envelope])
    owners = _largest_owners([row[0] for row in rows])
    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(12, 4.4 + 1.9 * len(rows)), layout="constrained")
        grid = figure.add_gridspec(1 + len(rows), 2, height_ratios=[1.5, *[1] * len(rows)])
        _bars(figure.add_subplot(grid[0, :]), results, safe)
        first: Any = None
        for place, row in enumerate(rows, 1):
            left = figure.add_subplot(grid[place, 0], sharey=first)
            first = first or left
            right = figure.add_subplot(grid[place, 1], sharey=first)
            right.tick_params(labelleft=False)
            envelope, detail = row[0].envelope, row[0].detail
            _stack(left, envelope, [sample.step for sample in envelope], owners, "mid")
            _stack(right, detail, [sample.launch for sample in detail], owners, "post")
            names = [marked(result.cell.strategy, safe[result.cell.strategy]) for result in row]
            left.set_ylabel("\n".join([*names, "MiB"]))
            if place == 1:
                setting = name_of(row[0].cell.setting)
                left.set_title(f"on loan by owner, {setting}: each step at its fullest moment")
                right.set_title(f"first operations of step {detail[0].step}, the one with most tokens")
        left.set_xlabel("step")
        right.set_xlabel("operations enqueued in the step")
        patches = [Patch(color=colour, label=owner) for owner, colour in owners.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=5)
        figure.suptitle(title)
        figure.savefig(path)
        pyplot.close(figure)


def _alike(results: Sequence[Result]) -> list[list[Result]]:
    """Results by what they had on loan: strategies that differ in what they hold often lend the same."""
    rows: dict[Any, list[Result]] = {}
    for result in results:
        moments = [*result.envelope, *result.detail]
        lent = tuple((sample.step, sample.launch, tuple(sorted(sample.owners.items()))) for sample in moments)
        rows.setdefault(lent, []).append(result)
    return list(rows.values())


def _bars(axes: Any, results: Sequence[Result], safe: Mapping[str, bool]) -> None:
    """Peaks of a setting's strategies beside each other: on loan, and what is held, of which that is a part."""
    settings = list(dict.fromkeys(result.cell.setting for result in results))
    names = list(dict.fromkeys(result.cell.strategy for result in results))
    width = 0.8 / len(names)
    for result in results:
        place = names.index(result.cell.strategy)
        at = settings.index(result.cell.setting) + (place - (len(names) - 1) / 2) * width
        colour = PALETTE[place % len(PALETTE)]
        axes.bar(at, result.bytes.peak_reserved / MIB, 0.9 * width, color=colour, alpha=0.4)
        axes.bar(at, result.bytes.peak_allocated / MIB, 0.9 * width, color=colour)
    logarithmic(axes.yaxis, (1, 2, 3, 5))
    axes.set_ylim(bottom=max(1, min(result.bytes.peak_allocated for result in results)) / MIB / 2)
    axes.set_xticks(range(len(settings)), map(name_of, settings))
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("peak MiB")
    axes.set_title("solid: on loan; pale: held from the device", loc="left")
    patches = [
        Patch(color=PALETTE[place % len(PALETTE)], label=marked(name, safe[name])) for place, name in enumerate(names)
    ]
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names), borderaxespad=0)


def _largest_owners(results: Sequence[Result]) -> dict[str, str]:
    """Colour of each of the largest owners by their peak in any result, then grey for the others."""
    peaks: dict[str, int] = {}
    for result in results:
        for owner, peak in result.bytes.owners.items():
            peaks[owner] = max(peaks.get(owner, 0), peak)
    ranked = sorted(peaks, key=lambda owner: (-peaks[owner], owner))
    return dict(zip(ranked, PALETTE, strict=False)) | {OTHERS: GREY}


def _others(sample: Sample, owners: dict[str, str]) -> int:
    return sample.allocated - sum(count for owner, count in sample.owners.items() if owner in owners)


def _stack(axes: Any, samples: Sequence[Sample], positions: Sequence[int], owners: dict[str, str], step: str) -> None:
    layers = []
    for owner in owners:
        named = [sample.owners.get(owner, 0) / MIB for sample in samples]
        layers.append([_others(sample, owners) / MIB for sample in samples] if owner == OTHERS else named)
    axes.stackplot(positions, layers, colors=list(owners.values()), step=step, linewidth=0)
    axes.set_xlim(positions[0], max(positions[-1], positions[0] + 1))


def draw_comparison(results: Sequence[Result], safe: Mapping[str, bool], title: str, path: Path) -> None:
    """Peak bytes held against host time per step, a panel for each setting; filled is SAFE, hollow is not.

    ``(!)`` is no safe strategy.
    """
    settings = list(dict.fromkeys(result.cell.setting for result in results))
    rows = list(dict.fromkeys((parts, aux) for _, parts, aux in settings))
    modes = list(dict.fromkeys(mode for mode, _, _ in settings))
    names = list(dict.fromkeys(result.cell.strategy for result in results))
    looks = {name: (PALETTE[index % len(PALETTE)], SHAPES[index % len(SHAPES)]) for index, name in enumerate(names)}
    width = 1.2 + 2.6 * len(modes)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            len(rows), len(modes), figsize=(width, 1.7 + 2.5 * len(rows)), sharex=True,
            sharey=True, squeeze=False, layout="constrained",
        )  # fmt: skip
        for result in results:
            cell = result.cell
            panel = axes[rows.index((cell.micro_batches, cell.aux_streams))][modes.index(cell.mode)]
            colour, shape = looks[cell.strategy]
            verdict = result.judgement.verdict
            sound = verdict == "SAFE"
            panel.scatter(
                result.host_us / 1000, result.bytes.peak_reserved / GIB, s=70, marker=shape, alpha=0.85,
                facecolor=colour if sound else "white", edgecolor=EDGES[verdict], linewidth=0.8 if sound else 2,
            )  # fmt: skip
        _scale(axes, modes, rows)
        handles = [
            Line2D([], [], marker=shape, ls="", color=colour, mec=INK, ms=8, label=marked(name, safe[name]))
            for name, (colour, shape) in looks.items()
        ]
        for verdict in sorted({result.judgement.verdict for result in results} - {"SAFE"}):
            hollow: Any = {"mfc": "white", "mec": EDGES[verdict], "mew": 2}
            handles.append(Line2D([], [], marker="o", ls="", ms=8, label=f"hollow: {verdict}", **hollow))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), int(width / ENTRY)))
        lines = (*title.splitlines(), "lower left is better")
        figure.suptitle("\n".join(fill(line, int(width * LETTERS)) for line in lines))
        figure.savefig(path)
        pyplot.close(figure)


def _scale(axes: Any, modes: Sequence[str], rows: Sequence[tuple[int, bool]]) -> None:
    """Logarithmic axes with plain numbers, and what each row and column is."""
    for panel, mode in zip(axes[0], modes, strict=True):
        panel.set_title(mode)
    for panel, (parts, aux) in zip(axes[:, 0], rows, strict=True):
        streams = "" if aux else "\nno side streams"
        panel.set_ylabel(f"{batches(parts)}{streams}\npeak held, GiB")
    for panel in axes[-1]:
        panel.set_xlabel("host time per step, ms")
    logarithmic(axes[0][0].xaxis, (1, 2, 5))
    logarithmic(axes[0][0].yaxis, (1, 2, 3, 5))


def logarithmic(axis: Any, marks: Sequence[int] = (1,)) -> None:
    """Make an axis, and those that share it, logarithmic, with plain numbers at these multiples of powers of ten."""
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set_major_locator(LogLocator(subs=marks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(NullLocator())
