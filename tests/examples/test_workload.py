"""The page on workloads is cut from its example, and the sweep replays that from the command line."""

from __future__ import annotations

import json
import re
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
    linked = [f"docs/{one}" for one in re.findall(r"\]\((.*?)\)", PAGE)]
    for name in re.findall(r"`((?:\w+/)+\w+(?:\.py)?)`", PAGE) + linked:
        assert (ROOT / name).exists(), name
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`.*?) \|", PAGE, re.MULTILINE)))) == set(ALL_MODES)
    command = re.search(r"^    python -m workspace (.*)$", PAGE, re.MULTILINE)
    assert command and command[1].split() == [
        "sweep", *WORKLOAD[:2], *(word for mode in MODES for word in ("--mode", mode)),
    ]  # fmt: skip
    assert "workspace.workloads" in tomllib.loads(blocks("toml")[0])["project"]["entry-points"]


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
