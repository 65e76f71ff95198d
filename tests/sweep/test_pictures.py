"""What the pictures of a sweep draw."""

from __future__ import annotations

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


def test_a_comparison_says_which_end_is_better(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both axes are costs."""
    figures: list[Any] = []
    monkeypatch.setattr(pictures.pyplot, "close", figures.append)
    pictures.draw_comparison([result("caching", 1.0, "SAFE")], "title", tmp_path / "comparison.png")
    monkeypatch.undo()
    pictures.pyplot.close(figures[0])
    (panel,) = figures[0].axes
    assert (panel.get_xlabel(), panel.get_ylabel().splitlines()[-1]) == ("host time per step, ms", "peak held, GiB")
    assert "lower left is better" in figures[0].get_suptitle()


def test_micro_batches_are_counted_in_words() -> None:
    """One is one."""
    assert (pictures.batches(1), pictures.batches(2)) == ("1 micro-batch", "2 micro-batches")
