"""The command line: what it prints, its exit codes, its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import workspace
from workspace import registry
from workspace.cli import main
from workspace.config import FIELDS
from workspace.sweep.result import Numbers

STANDIN = ["--workload", "tests.sweep.standin:ThreeLeases", "--jobs", "1", "--steps", "2"]


@pytest.fixture(autouse=True)
def _wide_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_config_shows_each_value_and_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting is listed; a value from the environment and one from --set say so."""
    monkeypatch.setenv("WORKSPACE_IN_FLIGHT", "3")
    done = run("config", "--set", "strategy=per_stream")
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert done.exit_code == 0 and set(FIELDS) <= set(rows)
    assert "3" in rows["in_flight"] and "environment WORKSPACE_IN_FLIGHT" in rows["in_flight"]
    assert "per_stream" in rows["strategy"] and "command line" in rows["strategy"]
    assert "default" in rows["granularity"]


def test_the_module_is_the_command() -> None:
    """`python -m workspace` does what the installed script does, under its name."""
    command = [sys.executable, "-m", "workspace"]
    root = Path(workspace.__file__).parents[1]
    listed = subprocess.run([*command, "strategies"], capture_output=True, text=True, cwd=root, check=True)
    assert listed.stdout == run("strategies").stdout
    refused = subprocess.run([*command, "swep"], capture_output=True, text=True, cwd=root, check=False)
    assert refused.returncode == 2 and "Usage: workspace " in refused.stderr


@pytest.mark.parametrize("command", [["-m", "workspace", "config"], ["-m", "dsv4", "generate", "--prompt", "hi"]])
def test_a_form_that_is_none_is_refused_without_a_traceback(command: list[str]) -> None:
    """Although the package looks at the variable as soon as it is imported."""
    environment = {**os.environ, "WORKSPACE_NATIVE": "2"}
    root = Path(workspace.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=root, env=environment, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "Error: WORKSPACE_NATIVE=2 is no form\nRemedy: write 0 for the Python form, 1 to demand the one in C++\n"
    )


def test_strategies_are_listed_with_a_line_each() -> None:
    """Each registered strategy has one line with its summary and whether it is safe."""
    done = run("strategies")
    for name, entry in registry.strategies().items():
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        assert entry.summary in line and ("yes" if entry.safe else "no") in line.split()


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (["config", "--set", "in_flight=-1"], "in_flight = '-1'", "at least 0"),
        (["config", "--set", "in_flght=1"], "unknown setting 'in_flght'", "did you mean 'in_flight'"),
        (["config", "--set", "in_flight"], "--set in_flight has no value", "KEY=VALUE"),
        (["config", "--set", "strategy=event_fence"], "event_fence", "event_fenced"),
        (["config", "--config", "absent.toml"], "cannot read absent.toml", "TOML"),
        (["sweep", "--strategy", "cachin", *STANDIN], "cachin", "caching"),
        (["sweep", *STANDIN, "--workload", "dsv5"], "there is no workload 'dsv5'", "dsv4"),
        (["sweep", *STANDIN, "--workload", "tests.sweep.standin:None"], "is no workload", "MODULE:CLASS"),
        (["sweep", *STANDIN, "--model", "large"], "there is no model 'large'", "choose 'small'"),
        (["sweep", *STANDIN, "--execute", "--workload", "tests.sweep.standin:Replayed"], "no numbers", "--execute"),
        (["sweep", *STANDIN, "--driver", "cuda"], "does not run on the 'cuda' driver", "--driver simulated"),
        (["sweep", *STANDIN, "--workload", "os:path"], "there is no workload 'os:path'", "MODULE:CLASS"),
        (
            ["sweep", *STANDIN, "--workload", "builtins:dict"],
            "'dict', as Workload of workload 'builtins:dict', has no 'name', has no 'models'",
            "docs/workload.md",
        ),
        (
            ["sweep", *STANDIN, "--workload", "nowhere.model:Mine"],
            "'nowhere.model:Mine' is not importable from here: No module named 'nowhere'",
            "the current folder",
        ),
        (["sweep", *STANDIN, "--workload", "tests.sweep.standin:Absent"], "no attribute 'Absent'", "MODULE:CLASS"),
        (["sweep", *STANDIN, "--workload", "os:"], "there is no workload 'os:'", "MODULE:CLASS"),
        (["sweep", *STANDIN, "--out", "/proc/x"], "--out /proc/x cannot be written to", "a folder"),
        (["sweep", *STANDIN, "--out", "/dev/null"], "--out /dev/null cannot be written to", "a folder"),
        (["sweep", *STANDIN, "--nvtx"], "'simulated', which no profiler sees", "--driver cuda"),
        (["sweep", *STANDIN, "--tokens", "4"], "--tokens with driver 'simulated'", "--driver cuda"),
    ],
)
def test_typed_errors_print_problem_and_remedy(arguments: list[str], problem: str, remedy: str) -> None:
    """A refusal exits with 2, names the problem and the remedy, and shows no traceback."""
    done = run(*arguments)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    error, advice = done.stderr.split("Remedy:")
    assert problem in error and remedy in advice and "Traceback" not in done.output


@pytest.mark.parametrize("driver", ["simulated", "cuda"])
def test_a_bad_setting_is_refused_before_any_cell_runs(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and not by each cell; before the driver is asked for, too."""
    monkeypatch.setenv("WORKSPACE_CAPACITY", "abc")
    monkeypatch.setattr("workspace.sweep.command.run_cells", lambda *_: pytest.fail("a cell was run"))
    done = run("sweep", *STANDIN, "--driver", driver)
    assert done.exit_code == 2 and "'abc'" in done.stderr and not Path("sweep-results").exists()


def test_a_workload_whose_module_imports_what_is_absent_names_that(tmp_path: Path) -> None:
    """And is not called unimportable itself."""
    (tmp_path / "lacking.py").write_text("import absent_package\n")
    command = [sys.executable, "-m", "workspace", "sweep", "--workload", "lacking:Mine"]
    root = str(Path(workspace.__file__).parents[1])
    packages = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": packages}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2 and "imports what is not installed: No module named 'absent_package'" in done.stderr


def test_installed_strategies_that_cannot_be_used_are_listed_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list says why and claims no safety for them; a sweep runs the others, and refuses one it is asked for."""
    points = [EntryPoint(name, "nowhere:Nothing", "workspace.strategies") for name in ("broken", "caching")]
    monkeypatch.setattr(
        "workspace.registry.entry_points",
        lambda group: points if group.endswith("strategies") else entry_points(group=group),
    )
    listed = run("strategies").stdout
    (line,) = [line for line in listed.splitlines() if line.startswith("broken ")]
    assert "?" in line.split() and "cannot be used: cannot be imported" in line and "yes" not in line.split()
    assert "'caching = nowhere:Nothing' is not used" in listed
    cell = "sweep", *STANDIN, "--mode", "eager", "--micro-batches", "1"
    done = run(*cell)
    assert done.exit_code == 0 and "left out: strategy 'broken' cannot be imported" in done.stderr
    report = json.loads(Path("sweep-results/sweep.json").read_text())
    assert {entry["cell"]["strategy"] for entry in report["cells"]} == {
        "caching",
        "event_fenced",
        "per_stream",
        "upstream",
        "unfenced",
    }
    done = run(*cell, "--strategy", "broken")
    assert done.exit_code == 2 and "strategy 'broken' cannot be imported" in done.stderr


def test_sweep_executes_under_as_many_schedules_as_asked() -> None:
    """Bits beside bytes in table and JSON; two schedules when no number is given; none unless asked for."""
    for given, schedules in ((["--execute", "3"], 3), (["--execute"], 2), ([], 0)):
        strategies = "--strategy", "caching", "--strategy", "unfenced"
        done = run("sweep", *given, *strategies, *STANDIN, "--mode", "eager", "--out", "results")
        assert done.exit_code == 0, done.output
        report = json.loads(Path("results/sweep.json").read_text())
        assert report["replay"]["schedules"] == schedules
        assert ("sums of leases" in done.stdout) == (report["computed"] != "") == bool(schedules)
        for entry in report["cells"]:
            assert (entry["numbers"] or {"schedules": 0})["schedules"] == schedules
            if schedules and entry["cell"]["strategy"] == "caching":
                assert entry["numbers"]["equal"] == schedules and f"{schedules}/{schedules}" in done.stdout


def test_other_numbers_under_a_safe_strategy_fail_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 1, and the message says in how many runs."""
    monkeypatch.setattr("workspace.sweep.cell.execute", lambda *_: Numbers(2, 1, 0))
    done = run("sweep", "--execute", "--strategy", "caching", *STANDIN, "--mode", "eager", "--out", "results")
    assert done.exit_code == 1 and "1 of 2 runs have the bits of caching" in done.stdout


def test_sweep_writes_table_report_and_pictures() -> None:
    """One small sweep prints a row for each cell and leaves the JSON and both pictures."""
    done = run("sweep", *STANDIN, "--mode", "eager", "--out", "results", "--seed", "3")
    assert done.exit_code == 0, done.output
    report = json.loads(Path("results/sweep.json").read_text())
    assert report["schema"] == 1 and report["replay"]["seed"] == 3
    assert report["replayed"] == {"steps": 2, "fewest": 16, "most": 64, "prefills": 2}
    assert {entry["cell"]["strategy"] for entry in report["cells"]} == set(registry.strategies())
    for entry in report["cells"]:
        assert entry["cell"]["strategy"] in done.stdout
    assert "replayed: 2 steps of 16 to 64 tokens, 2 with a prefill" in " ".join(done.stdout.split())
    for picture in ("bytes.png", "comparison.png"):
        assert Path("results", picture).read_bytes().startswith(b"\x89PNG")


def test_a_refused_cell_fails_the_sweep_unless_it_is_expected() -> None:
    """The stand-in has no wide mode: the exit code says so, and the report is written all the same."""
    cell = "sweep", *STANDIN, "--mode", "wide", "--strategy", "caching", "--micro-batches", "1"
    done = run(*cell)
    assert done.exit_code == 1 and "1 of 1 cells were refused" in done.output and "no wide regions" in done.output
    assert json.loads(Path("sweep-results/sweep.json").read_text())["cells"][0]["problem"] == "no wide regions here"
    assert run(*cell, "--allow-refused").exit_code == 0
