"""What the proof runs, when it is content, and how it goes on where it stopped."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from benchmarks import proof
from benchmarks.proof import CONTROL, SAFE, Part, as_it_must_be, known_records, parts
from workspace.sweep.plan import Cell
from workspace.sweep.workload import MODES

SOURCES = {"workspace": "one", "dsv4": "two"}


def record(part: Part, **found: Any) -> dict[str, Any]:
    good = {"equal": part.count, "verdict": "SAFE", "races": 0, "error": "", "cpu_seconds": 0.1}
    bad = {"equal": 0, "verdict": "UNSAFE", "races": 9}
    unjudged = {"verdict": "UNKNOWN", "races": 0}
    control = part.cell.strategy == CONTROL
    return part.key | good | (bad if control else {}) | (unjudged if part.first else {}) | found


def test_every_cell_has_all_its_seeds() -> None:
    """Each safe strategy, run mode, with and without side streams, one and two micro-batches; controls besides."""
    planned = parts(50)
    cells = {part.cell for part in planned}
    assert len(cells) == len(SAFE) * len(MODES) * 2 * 2 + len(MODES)
    assert {(cell.micro_batches, cell.aux_streams) for cell in cells if cell.strategy == "per_stream"} == {
        (1, True), (1, False), (2, True), (2, False),
    }  # fmt: skip
    for cell in cells:
        seeds = [part.first + i for part in planned if part.cell == cell for i in range(part.count)]
        assert seeds == list(range(50))


def test_a_record_is_as_it_must_be_only_with_all_bits_and_no_race() -> None:
    """And a control's only with a race and other bits."""
    safe, control = Part(Cell("per_stream", "wide", 2, True), 0, 10), Part(Cell(CONTROL, "wide", 2, True), 0, 10)
    assert as_it_must_be(record(safe)) and as_it_must_be(record(control))
    assert not as_it_must_be(record(safe, equal=9)) and not as_it_must_be(record(safe, verdict="UNSAFE"))
    assert not as_it_must_be(record(control, equal=10)) and not as_it_must_be(record(control, verdict="SAFE"))
    later = Part(safe.cell, 25, 10)
    assert as_it_must_be(record(later)) and not as_it_must_be(record(later, equal=9))


@pytest.mark.timeout(900)
def test_a_part_runs_and_the_control_is_caught() -> None:
    """Real runs of two parts in this process."""
    safe = proof.run(Part(Cell("event_fenced", "narrow", 2, True), 0, 2))
    control = proof.run(Part(Cell(CONTROL, "narrow", 2, True), 0, 3))
    assert as_it_must_be(safe) and as_it_must_be(control)
    assert (safe["cell"]["mode"], safe["first_seed"], safe["seeds"], safe["equal"]) == ("narrow", 0, 2, 2)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """Parts that `main` runs, which succeed at once."""
    found: list[Part] = []

    def run_all(todo: list[Part], jobs: int, until: float) -> Any:
        for part in todo:
            found.append(part)
            yield record(part)

    monkeypatch.setattr(proof, "run_all", run_all)
    monkeypatch.setattr(proof, "sources", lambda: SOURCES)
    return found


def test_a_second_run_goes_on_where_the_first_stopped(
    tmp_path: Path, executed: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first says what is missing and fails; the second runs that and no more."""
    out, everything = tmp_path / "proof.json", proof.run_all
    monkeypatch.setattr(proof, "run_all", lambda *given: islice(everything(*given), 5))
    first = CliRunner().invoke(proof.main, ["--out", str(out)])
    report = orjson.loads(out.read_bytes())
    assert first.exit_code == 1 and len(report["records"]) == 5
    assert len(report["missing"]) == report["parts"] - 5 == len(parts(50)) - 5
    monkeypatch.setattr(proof, "run_all", everything)
    executed.clear()
    second = CliRunner().invoke(proof.main, ["--out", str(out)])
    report = orjson.loads(out.read_bytes())
    assert second.exit_code == 0 and not report["missing"] and report["as_they_must_be"] == report["parts"]
    assert len(executed) == report["parts"] - 5 and report["schedules"] == 50 * 65
    lines = out.with_suffix(".md").read_text().splitlines()
    assert "| per_stream | 200 of 200 | 200 of 200 | 200 of 200 | 200 of 200 | 200 of 200 | SAFE |" in lines
    assert any(line.startswith("| unfenced | 0 of 50") and "UNSAFE" in line for line in lines)


@pytest.mark.parametrize("now", [SOURCES | {"dsv4": "three"}, SOURCES | {"dsv4": "two-dirty"}])
def test_records_of_other_sources_are_not_taken_over(tmp_path: Path, executed: list[Part], now: dict[str, str]) -> None:
    """Nor those of a tree that differs from its commit."""
    out = tmp_path / "proof.json"
    CliRunner().invoke(proof.main, ["--out", str(out)])
    assert len(known_records(out, SOURCES)) == len(parts(50)) and known_records(out, now) == []
