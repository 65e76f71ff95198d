"""The page on workloads is cut from its example, and the sweep replays that from the command line."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from examples.workload import Ported
from examples.workload.replayed import MODES, MOST, Part
from workspace.cli import main
from workspace.errors import ConfigError
from workspace.sweep import workload as protocols
from workspace.sweep.workload import MODES as ALL_MODES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/workload.md").read_text(encoding="utf-8")
EXAMPLE = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples/workload").glob("*.py")}
WORKLOAD = ["--workload", "examples.workload:Ported", "--jobs", "1"]
SAFE = ("caching", "event_fenced", "per_stream")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def sweep(out: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "240"}).invoke(main, ["sweep", *WORKLOAD, "--out", str(out), *arguments])


def cells(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "sweep.json").read_text(encoding="utf-8"))["cells"]
    return found


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: textwrap.shorten(block, 40))
def test_every_block_of_the_page_stands_in_the_example(block: str) -> None:
    """Literally, line by line."""
    assert any(block in text for text in EXAMPLE.values())
    assert not any(block.replace("self", "itself").replace("mode", "way") in text for text in EXAMPLE.values())


def test_the_page_names_what_there_is() -> None:
    """Files, the command and the table's modes; the entry point is one that a package can have."""
    linked = [f"docs/{one}" for one in re.findall(r"\]\((.*?)[#)]", PAGE)]
    for name in re.findall(r"`((?:\w+/)+\w+(?:\.py)?)`", PAGE) + linked:
        assert (ROOT / name).exists(), name
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`.*?) \|", PAGE, re.MULTILINE)))) == set(ALL_MODES)
    whole, fuller = (line.split() for line in re.findall(r"^    python -m workspace (.*)$", PAGE, re.MULTILINE))
    assert whole == ["sweep", "--workload", "examples.workload.mlp:MLP", "--mode", "eager"]
    assert fuller == ["sweep", *WORKLOAD[:2], *(word for mode in MODES for word in ("--mode", mode))]
    assert "workspace.workloads" in tomllib.loads(blocks("toml")[0])["project"]["entry-points"]


def test_the_page_names_every_member_of_the_protocols() -> None:
    """With its arguments, as `workspace.sweep.protocol` asks for them."""
    rows = dict(re.findall(r"^\| .*`(\w+)` \| (`.*`) \|$", PAGE, re.MULTILINE))
    assert set(rows) == {"Workload", "Session", "Step", "Runner", "Execution", "Program"}
    for name, row in rows.items():
        protocol = getattr(protocols, name)
        own = {key: member for key, member in vars(protocol).items() if not key.startswith("_")}
        asked = []
        for key in dict.fromkeys([*protocol.__annotations__, *own]):
            taken = list(inspect.signature(own[key]).parameters)[1:] if inspect.isfunction(own.get(key)) else None
            asked.append(key if taken is None else f"{key}({', '.join(taken)})")
        assert re.findall(r"`(.*?)`", row) == asked


def test_the_whole_workload_is_a_file_that_runs(tmp_path: Path) -> None:
    """From its text on the page alone, in a folder of its own; two micro-batches race under the control."""
    block = next(block for block in blocks("python") if "class MLP" in block)
    assert block == EXAMPLE["mlp.py"] and block.isascii()
    (tmp_path / "mine.py").write_text(block, encoding="utf-8")
    command = [sys.executable, "-m", "workspace", "sweep", "--workload", "mine:MLP", "--jobs", "1", "--steps", "4"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [*command, "--mode", "eager", "--out", "."], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = {(one["cell"]["strategy"], one["cell"]["micro_batches"]): one for one in cells(tmp_path)}
    verdicts = {key: one["judgement"]["verdict"] for key, one in found.items()}
    assert {verdicts[name, parts] for name in SAFE for parts in (1, 2)} == {"SAFE"}
    assert (verdicts["unfenced", 1], verdicts["unfenced", 2]) == ("SAFE", "UNSAFE")
    assert "SAFE of a strategy marked (!)" in done.stdout and "note:" not in done.stdout


def test_the_whole_workload_refuses_what_it_has_not(tmp_path: Path) -> None:
    """Modes, models and traces."""
    for arguments, says in (
        (("--model", "huge"), "no model 'huge'"),
        (("--trace", "x.csv"), "trace x.csv"),
        (("--mode", "full", "--strategy", "caching"), "the MLP has no mode 'full'"),
    ):
        done = sweep(tmp_path, "--workload", "examples.workload.mlp:MLP", "--steps", "1", *arguments)
        assert done.exit_code != 0 and says in done.output


@pytest.mark.timeout(900)  # the longest of all: with other work on the cores it took half of the usual limit
def test_the_sweep_replays_and_computes_it(tmp_path: Path) -> None:
    """Safe strategies are judged so, with the bits of caching; two micro-batches show what `unfenced` lacks."""
    modes = [word for mode in MODES for word in ("--mode", mode)]
    done = sweep(tmp_path, *modes, "--steps", "1", "--execute", "1")
    assert done.exit_code == 0, done.output
    found = cells(tmp_path)
    assert len(found) == 5 * len(MODES) * 2
    for one in found:
        name, parts = one["cell"]["strategy"], one["cell"]["micro_batches"]
        assert one["judgement"]["accesses"] > 0
        if name in SAFE:
            assert (one["judgement"]["verdict"], one["numbers"]["equal"]) == ("SAFE", 1), one["cell"]
        if name == "unfenced":
            assert one["judgement"]["verdict"] == ("UNSAFE" if parts == 2 else "SAFE"), one["cell"]


def test_without_side_streams_it_is_the_model_without(tmp_path: Path) -> None:
    """Fewer waits, the same numbers."""
    waits = []
    for aux in ("on", "off"):
        arguments = "--strategy", "event_fenced", "--mode", "eager", "--micro-batches", "1", "--steps", "1"
        done = sweep(tmp_path / aux, *arguments, "--aux", aux, "--execute", "1")
        (one,) = cells(tmp_path / aux)
        assert done.exit_code == 0 and one["numbers"]["equal"] == 1
        waits.append(one["driver_calls"]["wait"])
    assert waits[1] < waits[0]


def test_more_layers_are_more_accesses(tmp_path: Path) -> None:
    """The model chosen is the one replayed."""
    seen = {}
    for model in Ported.models:
        arguments = "--strategy", "caching", "--mode", "eager", "--micro-batches", "1", "--steps", "1"
        assert sweep(tmp_path / model, "--model", model, *arguments).exit_code == 0
        seen[model] = cells(tmp_path / model)[0]["judgement"]["accesses"]
    assert seen["large"] > 3 * seen["small"]


def test_a_read_that_is_left_out_hides_its_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a join that is forgotten is found by what the sum reads; without that read it is not."""

    def forgotten(reads: bool) -> str:
        def mix(part: Part, hidden: Any, tokens: int) -> None:
            from examples.porting.after import MIXTURE

            ws, launch = part.ws, part.ws.device.launch
            with ws.lease(MIXTURE, T=tokens) as s:
                launch("norm", writes=[s.normed])
                ready = ws.event()
                ready.record()
                ready.wait(part.side)
                with ws.on(part.side):
                    launch("shared", writes=[s.shared])
                launch("add", reads=[s.shared] if reads else [], writes=[hidden])
                ws.use(s.shared, part.side)

        monkeypatch.setattr(Part, "mix", mix)
        out = tmp_path / str(reads)
        sweep(out, "--strategy", "event_fenced", "--mode", "eager", "--micro-batches", "1", "--steps", "1")
        return str(cells(out)[0]["judgement"]["verdict"])

    assert (forgotten(reads=True), forgotten(reads=False)) == ("UNSAFE", "SAFE")


def test_modes_it_has_not_are_refused(tmp_path: Path) -> None:
    """Exit code 1, unless refusals are allowed."""
    arguments = "--mode", "wide", "--strategy", "caching", "--micro-batches", "1", "--steps", "1"
    done = sweep(tmp_path, *arguments)
    assert done.exit_code == 1 and "the ported layer has no mode 'wide'" in done.output
    assert sweep(tmp_path, *arguments, "--allow-refused").exit_code == 0


def test_what_it_does_not_know_is_refused_in_two_lines(tmp_path: Path) -> None:
    for arguments, says in (
        (("--model", "huge"), "there is no model 'huge'"),
        (("--trace", "x.csv"), "trace x.csv is not read"),
        (("--driver", "cuda"), "does not run on the 'cuda' driver"),
    ):
        done = sweep(tmp_path, *arguments)
        assert done.exit_code == 2 and says in done.output and "Remedy: " in done.output


def test_steps_are_the_same_in_every_process() -> None:
    """By the seed; and none is larger than what is declared."""
    first, again = (list(Ported().open("small", None, 3).steps(50)) for _ in range(2))
    other = list(Ported().open("small", None, 4).steps(50))
    assert first == again != other and len(first) == 50
    assert {step.prefill_tokens > 0 for step in first} == {True, False}
    assert max(step.tokens for step in first + other) <= MOST
    with pytest.raises(ConfigError):
        Ported().open("huge", None, 0)
