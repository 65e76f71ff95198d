"""What the pictures of a sweep draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.sweep.test_table import result
from workspace.sweep import pictures
from workspace.sweep.result import Bytes, Sample

MIB = 1 << 20


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, others: int = 4) -> Any:
    """The figure of `draw_bytes` for a safe and an unsafe strategy, of which the second lends so many MiB."""
    figures: list[Any] = []
    monkeypatch.setattr(pictures.pyplot, "close", figures.append)
    results = []
    for name, lent in (("caching", 4), ("upstream", others)):
        samples = tuple(Sample(step, step, lent * MIB, 9 * MIB, {"moe": lent * MIB}) for step in range(3))
        results.append(attrs.evolve(result(name, 1.0, "SAFE"), envelope=samples, detail=samples))
    narrow = attrs.evolve(results[0].cell, mode="narrow")
    unsampled = attrs.evolve(results[0], cell=narrow, bytes=Bytes(2 * MIB, 8 * MIB, 0, {}), envelope=(), detail=())
    pictures.draw_bytes([*results, unsampled], {"caching": True, "upstream": False}, "title", path / "bytes.png")
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


def test_bars_show_what_every_cell_holds_and_lends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On an axis that has room for both, though one is many times the other; sampled or not."""
    bars = drawn(monkeypatch, tmp_path).axes[0]
    heights = [bar.get_height() for bar in bars.patches]
    assert heights == [26_582, 1777, 26_582, 1777, 8, 2]
    assert bars.get_yscale() == "log" and bars.get_ylim()[0] < 2 and bars.get_ylim()[1] > 26_582
    assert [tick.get_text() for tick in bars.get_xticklabels()] == ["overflow x2", "narrow x2"]
    assert [text.get_text() for text in bars.get_legend().get_texts()] == ["caching", "upstream (!)"]


@pytest.mark.parametrize(
    ("others", "rows"), [(4, ["caching\nupstream (!)\nMiB"]), (3, ["caching\nMiB", "upstream (!)\nMiB"])]
)
def test_strategies_that_lend_alike_share_a_row(
    others: int, rows: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is named, and marked by (!) where it is not safe, as in the table."""
    panels = drawn(monkeypatch, tmp_path, others).axes[1:]
    assert [panel.get_ylabel() for panel in panels[::2]] == rows
    assert "overflow x2" in panels[0].get_title()


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
