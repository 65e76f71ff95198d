"""What the pictures of a sweep draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.sweep.test_table import result
from workspace.sweep import pictures
from workspace.sweep.result import Sample

MIB = 1 << 20


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, reserved: int) -> Any:
    """The figure of `draw_bytes` for a safe and an unsafe strategy that lend 4 MiB and hold so many."""
    figures: list[Any] = []
    monkeypatch.setattr(pictures.pyplot, "close", figures.append)
    samples = tuple(Sample(step, step, 4 * MIB, reserved * MIB, {"moe": 4 * MIB}) for step in range(3))
    results = [
        attrs.evolve(result(name, 1.0, "SAFE"), envelope=samples, detail=samples) for name in ("caching", "upstream")
    ]
    pictures.draw_bytes(results, {"caching": True, "upstream": False}, "title", path / "bytes.png")
    monkeypatch.undo()
    pictures.pyplot.close(figures[0])
    return figures[0]


def compared(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    *verdicts: str,
    names: Sequence[str] = ("caching",),
    title: str = "title",
) -> Any:
    """The figure of `draw_comparison`."""
    figures: list[Any] = []
    monkeypatch.setattr(pictures.pyplot, "close", figures.append)
    results = [result(name, 1.0, verdict) for name in names for verdict in verdicts]
    safe = {name: name not in ("upstream", "unfenced") for name in names}
    pictures.draw_comparison(results, safe, title, path / "comparison.png")
    monkeypatch.undo()
    pictures.pyplot.close(figures[0])
    return figures[0]


@pytest.mark.parametrize(("reserved", "lines"), [(5, 1), (500, 0)])
def test_bytes_held_are_drawn_only_in_range(
    reserved: int, lines: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A line that would leave the panel is left out whole; the peak stands beside it as text in any case."""
    figure = drawn(monkeypatch, tmp_path, reserved)
    assert [len(panel.lines) for panel in figure.axes] == [lines] * 4
    (legend,) = figure.legends
    assert ("held (where in range)" in [text.get_text() for text in legend.get_texts()]) == bool(lines)
    assert sum("held from the device" in text.get_text() for panel in figure.axes for text in panel.texts) == 2


def test_unsafe_strategies_are_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By (!), as in the table; a safe one is not."""
    labels = [panel.get_ylabel() for panel in drawn(monkeypatch, tmp_path, 5).axes[::2]]
    assert labels == ["caching\nMiB", "upstream (!)\nMiB"]


def test_unsafe_strategies_are_marked_in_the_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though the verdict on the cell is SAFE."""
    (legend,) = compared(monkeypatch, tmp_path, "SAFE", names=("caching", "upstream")).legends
    assert [text.get_text() for text in legend.get_texts()] == ["caching", "upstream (!)"]


def test_a_comparison_says_which_end_is_better(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both axes are costs."""
    figure = compared(monkeypatch, tmp_path, "SAFE")
    (panel,) = figure.axes
    assert (panel.get_xlabel(), panel.get_ylabel().splitlines()[-1]) == ("host time per step, ms", "peak held, GiB")
    assert "lower left is better" in figure.get_suptitle()


@pytest.mark.parametrize("verdict", ["SAFE", "UNSAFE", "UNKNOWN"])
def test_a_legend_explains_the_verdicts_there_are(
    verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (legend,) = compared(monkeypatch, tmp_path, verdict).legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["caching"] + [f"hollow: {verdict}"] * (verdict != "SAFE")


def test_the_narrowest_comparison_shows_its_title_and_legend_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One mode, five strategies, two verdicts and the description of a session: nothing leaves the picture."""
    names = ["caching", "event_fenced", "per_stream", "upstream", "unfenced"]
    figure = compared(
        monkeypatch, tmp_path, "UNSAFE", "UNKNOWN", names=names, title=f"title\n{'describes it all ' * 6}"
    )
    edge = figure.bbox
    for artist in (figure._suptitle, *figure.legends):
        box = artist.get_window_extent()
        assert edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1


def test_micro_batches_are_counted_in_words() -> None:
    """One is one."""
    assert (pictures.batches(1), pictures.batches(2)) == ("1 micro-batch", "2 micro-batches")
