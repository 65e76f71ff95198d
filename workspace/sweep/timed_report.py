"""What a timed sweep leaves: a file that a later run goes on from, a table, and the picture of bytes against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from workspace.sweep.report import provenance, write_json
from workspace.sweep.timed import BASELINE, TRACE, Setting, Timing, ratio

MIB = 1 << 20
SCHEMA = 1

Timings = dict[Setting, list[Timing]]


class Record:
    """``timed.json`` in a folder: the settings that are done, written anew after each.

    Parameters
    ----------
    plan
        What all settings share. A file of another plan, commit, GPU or torch is begun anew.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self._path = folder / "timed.json"
        self._head: dict[str, Any] = {"schema": SCHEMA, "made": provenance(), "plan": dict(plan)}
        self.done: Timings = {}
        if self._path.exists():
            self._take_over(orjson.loads(self._path.read_bytes()))

    def _take_over(self, found: dict[str, Any]) -> None:
        same = ("commit", "gpu", "torch")
        made = found.get("made", {})
        if found.get("schema") != SCHEMA or found.get("plan") != orjson.loads(orjson.dumps(self._head["plan"])):
            return
        if any(made.get(key) != self._head["made"][key] for key in same):
            return
        self.done = timings_of(found)

    def add(self, setting: Setting, timings: list[Timing]) -> None:
        """Keep a setting's timings."""
        self.done[setting] = timings
        settings = [
            attrs.asdict(one) | {"timings": [attrs.asdict(own) for own in found]} for one, found in self.done.items()
        ]
        partial = self._path.with_suffix(".partial")
        write_json(self._head | {"settings": settings}, partial)
        partial.replace(self._path)

    @property
    def title(self) -> str:
        """What was timed, and on which GPU."""
        return title_of(self._head)


def timings_of(content: Mapping[str, Any]) -> Timings:
    """The settings of a file as `Record` writes it."""
    found = {}
    for one in content["settings"]:
        timings = [Timing(**{**own, **_tuples(own)}) for own in one["timings"]]
        found[Setting(**{key: value for key, value in one.items() if key != "timings"})] = timings
    return found


def title_of(content: Mapping[str, Any]) -> str:
    """Of the picture of a file as `Record` writes it."""
    gpu = content["made"]["gpu"]
    return f"Peak bytes and time of a step{f' on one {gpu}' if gpu else ''}\n{content['plan']['model']}"


def _tuples(own: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return {key: tuple(own[key]) for key in ("step_us", "host_us", "device_us", "first_token_us")}


def print_timings(console: Console, found: Timings, safe: Mapping[str, bool]) -> None:
    """A row for each strategy in each setting."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in ("setting", "strategy"):
        table.add_column(heading, no_wrap=True)
    headings = (
        "step us", "host us", "device us", f"step / {BASELINE}", "first token ms", "allocs", "fences", "elided", "held",
        "peak",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for setting, timings in found.items():
        base = next((one for one in timings if one.strategy == BASELINE and one.step_us), None)
        for place, one in enumerate(timings):
            name = one.strategy if safe[one.strategy] else f"{one.strategy} (!)"
            front = (str(setting) if not place else "", name)
            if one.problem:
                table.add_row(*front, "refused")
                continue
            middle, low, high = ratio(one, base) if base else (0.0, 0.0, 0.0)
            table.add_row(
                *front,
                *(f"{median(values):,.0f}" for values in (one.step_us, one.host_us, one.device_us)),
                f"{middle:.3f} ({low:.3f}-{high:.3f})" if base else "",
                f"{median(one.first_token_us) / 1000:,.0f}" if one.first_token_us else "",
                *(f"{count:,}" for count in (one.allocator_calls, one.fences, one.elided)),
                *(f"{nbytes / MIB:,.0f}" for nbytes in (one.reserved, one.peak)),
            )
        table.add_section()
    console.print(table)
    console.print(
        "Medians over the rounds of a step; the ratio is paired, with its 95% interval. held, peak: MiB from the "
        "device's allocator between steps, and at most in one. (!): not a safe strategy.",
        style="dim",
    )


def draw(found: Timings, safe: Mapping[str, bool], title: str, path: Path) -> None:
    """The cost of safety: peak bytes against the time of a step, from 0, a panel for each setting.

    Rows are modes, columns sizes of steps; ``(!)`` is no safe strategy. Where the bytes of one setting lie more than a
    decade apart, all panels have the same logarithmic axis for them.
    """
    from workspace.sweep.pictures import INK, PALETTE, SHAPES, STYLE, logarithmic, marked, pyplot

    settings = [setting for setting, own in found.items() if any(one.step_us for one in own)]
    peaks = [[one.peak for one in found[setting] if one.step_us] for setting in settings]
    apart = min(map(min, peaks)) > 0 and any(max(own) > 10 * min(own) for own in peaks)
    rows = list(dict.fromkeys(_row(setting) for setting in settings))
    columns = sorted({setting.tokens for setting in settings}, key=lambda tokens: (tokens == TRACE, tokens))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(
            len(rows), len(columns), figsize=(1.2 + 2.6 * len(columns), 1.6 + 2.1 * len(rows)), squeeze=False,
            sharey=apart, layout="constrained",
        )  # fmt: skip
        for panel in axes.flat:
            panel.set_visible(False)
        for setting in settings:
            panel = axes[rows.index(_row(setting)), columns.index(setting.tokens)]
            panel.set_visible(True)
            for place, (name, is_safe) in enumerate(safe.items()):
                colour = PALETTE[place % len(PALETTE)]
                look: Any = {"marker": SHAPES[place % len(SHAPES)], "linewidth": 0.8, "s": 55}
                look |= {"facecolor": colour, "edgecolor": INK, "label": marked(name, is_safe)}
                for one in found[setting]:
                    if one.strategy == name and one.step_us:
                        panel.scatter(median(one.step_us) / 1000, one.peak / MIB, **look)
            panel.set_title(str(setting), fontsize=8)
            panel.set_xlim(0, panel.get_xlim()[1] * 1.05)
            panel.tick_params(labelleft=True)
            if not apart:
                panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
        if apart:
            logarithmic(axes[0, 0].yaxis)
        handles: dict[str, Any] = {}
        for panel in axes.flat:
            handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
        figure.supxlabel("time of a step, ms")
        figure.supylabel("peak, MiB")
        figure.legend(handles.values(), handles, loc="outside right upper")
        figure.suptitle(title)
        figure.savefig(path)
        pyplot.close(figure)


def _row(setting: Setting) -> tuple[str, int, bool]:
    return setting.mode, setting.micro_batches, setting.aux_streams


def refused(found: Timings) -> Sequence[str]:
    """Setting, strategy and reason of each refusal."""
    return [f"{setting}: {one.strategy}: {one.problem}" for setting, own in found.items() for one in own if one.problem]
