"""``python -m benchmarks``: what it lists, what it refuses, and its exit code."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks.figure import Figure

ROOT = Path(command.__file__).parent


def test_help_lists_what_there_is() -> None:
    """Each benchmark with the first line of what it says of itself, and the commands apart."""
    done = CliRunner().invoke(command.main, ["--help"], terminal_width=500, max_content_width=500)
    assert done.exit_code == 0
    for name in command.NAMES:
        assert f"{name}: {command._about(name)}" in done.output and command._about(name)
    for name in command.APART:
        assert f"python -m benchmarks.{name}" in done.output
        assert (ROOT / f"{name}.py").exists() or (ROOT / name / "__main__.py").exists()


@pytest.mark.parametrize("name", ["nope", "proof", "__main__"])
def test_another_name_is_refused_with_those_there_are(name: str) -> None:
    """Before anything is run."""
    done = CliRunner().invoke(command.main, ["steady_state", name])
    assert done.exit_code == 2
    assert all(repr(one) in done.output for one in (name, *command.NAMES))


@pytest.mark.parametrize(("value", "exit_code"), [(1.0, 0), (3.0, 1)])
def test_a_missed_target_is_the_exit_code(
    value: float, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named benchmark runs, and no other; it is written either way."""
    asked = []

    def module(name: str) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(__doc__="About.", figures=lambda: [Figure("calls", value, "calls", 2.0)])

    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "import_module", module)
    done = CliRunner().invoke(command.main, ["fork_join"])
    assert (done.exit_code, asked) == (exit_code, ["benchmarks.fork_join"])
    assert "missed" in (tmp_path / "fork_join.md").read_text(encoding="utf-8") or exit_code == 0


def test_every_name_is_a_module_with_figures() -> None:
    for name in command.NAMES:
        assert callable(importlib.import_module(f"benchmarks.{name}").figures)
