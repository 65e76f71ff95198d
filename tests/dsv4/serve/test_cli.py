"""The command line: what it prints, its exit codes, its errors."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from dsv4.cli import PICTURES, main
from dsv4.model.decoder import Outcome
from dsv4.scheduler import Rows
from dsv4.serve.model import Contexts, RunnerModel
from dsv4.serve.tokenizer import ByteTokenizer
from dsv4.trace import HEADER

TRACED = ["--max-model-len", "64", "--max-num-batched-tokens", "32"]
SHORT = ["--max-new-tokens", "5", "--max-model-len", "64", "--max-num-batched-tokens", "32"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def generated(*arguments: object) -> str:
    done = run("generate", "--prompt", "hello", *SHORT, *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_generate_prints_the_same_text_under_every_strategy() -> None:
    """The built-in model; standard error says that its weights are random. Another seed of them says other things."""
    done = run("generate", "--prompt", "hello", *SHORT, "--workspace", "event_fenced")
    assert done.exit_code == 0 and "random weights" in done.stderr
    assert done.stdout == generated("--workspace", "caching") != generated("--weights-seed", "1")
    assert len(done.stdout) > 1 and done.stdout.endswith("\n")


def test_token_ids_are_those_of_the_text() -> None:
    """What is no UTF-8 looks alike as a text, and differs as ids."""
    tokens = [int(line) for line in generated("--token-ids").splitlines()]
    text = ByteTokenizer().text()
    assert len(set(tokens)) > 1
    assert text.add(tokens) + text.end() + "\n" == generated()


def test_draws_follow_their_seed() -> None:
    texts = [generated("--temperature", "1.5", "--top-p", "0.95", "--seed", seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_speculative_decoding_prints_the_same_text_and_how_often_it_was_right() -> None:
    done = run("generate", "--prompt", "hello", *SHORT, "--speculative", "2")
    assert done.stdout == generated()
    assert "guessed tokens were right" in done.stderr


def test_a_stop_text_ends_the_text() -> None:
    """It is the last one printed."""
    text = generated("--ignore-eos")
    stop = next(letter for letter in text[1:] if letter.isascii() and letter != "\n")
    assert generated("--stop", stop) == text[: text.index(stop) + 1] + "\n"


@pytest.mark.parametrize("format", ("deepseek", "transformers"))
def test_a_saved_checkpoint_generates_what_its_model_does(format: str, tmp_path: Path) -> None:
    """`save` writes the random weights of a seed; the note says which tokenizer is used."""
    assert run("save", tmp_path / "saved", "--format", format).exit_code == 0
    done = run("generate", "--prompt", "hello", *SHORT, "--checkpoint", tmp_path / "saved")
    assert done.stdout == generated()
    assert "has no tokenizer.json: a token is a byte" in done.stderr


def trace(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join((HEADER, *lines)))
    return file


def test_serve_trace_reports_times_and_bytes(tmp_path: Path) -> None:
    """As a table and as JSON; lengths are divided so that the longest request fits, and it says by what."""
    file = trace(
        tmp_path,
        "2023-11-16 18:15:46.6805900,120,8",
        "2023-11-16 18:15:46.7,16,24",
        "2023-11-16 18:15:47.9,40,4",
    )
    limits = ["--max-model-len", "64", "--max-num-batched-tokens", "32", "--speed-up", "100"]
    done = run("serve-trace", "--trace", file, *limits, "--json", tmp_path / "report.json", "--speculative", "1")
    assert done.exit_code == 0, done.output
    assert "lengths divided by 2\n" in done.stdout and "3 of 3 finished" in done.stdout
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["prompt_tokens"] == 60 + 8 + 20 and found["generated_tokens"] == 4 + 12 + 2
    assert 0 < found["first_token"]["p50"] <= found["first_token"]["p99"] <= found["seconds"]
    assert 0 < found["workspace_peak"] <= sum(found["owners"].values())
    assert 0 < found["caches_peak"] <= found["caches_held"]
    assert found["acceptance"] is not None and found["problems"] == {}
    assert found["settings"]["length_divisor"] == 2 and found["settings"]["max_model_len"] == 64


def test_a_failed_step_is_reported_with_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1; the other request is served."""
    whole = RunnerModel.forward

    def failing(self: RunnerModel, rows: Sequence[Rows], contexts: Contexts) -> Outcome:
        if any(one.request == 0 for one in rows):
            raise ArithmeticError("on purpose")
        return whole(self, rows, contexts)

    monkeypatch.setattr(RunnerModel, "forward", failing)
    file = trace(tmp_path, "2023-11-16 18:15:46.6805900,8,8", "2023-11-16 18:15:46.7,40,2")
    limits = ["--max-model-len", "64", "--max-num-batched-tokens", "32", "--max-num-seqs", "1"]
    done = run("serve-trace", "--trace", file, *limits)
    assert done.exit_code == 1
    assert "1 of 2 finished" in done.stdout
    assert "request 0: a step of the model failed: ArithmeticError: on purpose" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem", "remedy"),
    [
        (["generate", "--prompt", ""], "the prompt is empty", "one token or more"),
        (["generate", "--prompt", "x" * 60, *SHORT], "a context of 65 tokens is needed", "shorten the prompt"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature=-1.0", "0 for the likeliest"),
        (["generate", "--prompt", "x", "--top-p", "1.5"], "top_p=1.5", "pass 1"),
        (["generate", "--prompt", "x", "--stop", "end"], "stop text 'end' is 3 tokens", "one token"),
        (["generate", "--prompt", "x", "--workspace", "cachin"], "'cachin' is not known", "'caching'"),
        (["generate", "--prompt", "x", "--workspace", "unfenced"], "does not keep scratch intact", "safe strategy"),
        (["generate", "--prompt", "x", "--model", "flsh"], "neither a preset nor a file", "'flash'"),
        (["generate", "--prompt", "x", "--model", "pro"], "the weights take", "fewer layers or experts"),
        (["generate", "--prompt", "x", "--checkpoint", "absent"], "absent is no folder", "config.json"),
        (["generate", "--prompt", "x", "--memory", "1MiB"], "a memory of 1048576 bytes is too small", "bytes or more"),
        (["generate", "--prompt", "x", "--mode", "full"], "no graphs", "simulated"),
        (["generate", "--prompt", "x", "--max-model-len", "5000"], "4096 positions", "lower max_model_len"),
        (["save", "cut.csv/saved"], "cut.csv/saved cannot be written: Not a directory", "a folder with room"),
        (["serve-trace", "--json", "absent/report.json"], "absent/report.json' cannot be written: No such", "a folder"),
        (["serve-trace", "--json", "."], "the report '.' cannot be written: Is a directory", "a folder"),
        (["serve-trace", "--json", ""], "the report '' cannot be written: No such file", "a folder"),
        (["generate", "--prompt", "\udcff", *SHORT], r"the text '\udcff' is no Unicode", "UTF-8"),
        (["generate", "--prompt", "x", *SHORT, "--stop", "\udcff"], r"the text '\udcff' is no Unicode", "UTF-8"),
        (["generate", "--prompt", "x", "--model", "nope"], "neither a preset nor a file", "small, flash, pro or a"),
        (["generate", "--prompt", "x", "--model", "smal"], "neither a preset nor a file", "did you mean 'small'?"),
        (["save", "saved", "--model", "nope"], "neither a preset nor a file", "small, flash, pro or a"),
        (["serve-trace", "--max-num-seqs", "600"], "is below max_num_seqs=600", "lower the second"),
        (["serve-trace", "--trace", "absent.csv"], "absent.csv cannot be read", "CSV with the columns"),
        (["serve-trace", "--trace", "foreign.csv"], "line 1: 'time,prompt'", "complete CSV"),
        (["serve-trace", "--trace", "cut.csv"], "the file may be cut off", "complete CSV"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_two_lines(
    arguments: list[str], problem: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, the error, the remedy, no traceback."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.csv").write_text("time,prompt\n1,2\n")
    trace(tmp_path, "2023-11-16 18:15:46.6805900,120,8", "2023-11-16 18:15:46.7,1").rename(tmp_path / "cut.csv")
    done = run(*arguments)
    assert done.exit_code == 2
    error, answer = done.stderr.strip().splitlines()[-2:]
    assert error.startswith("Error: ") and problem in error
    assert answer.startswith("Remedy: ") and remedy in answer


def test_a_report_that_is_refused_or_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad trace, and a disk that is full at the end: exit code 2, and nothing lies beside the file."""
    report = tmp_path / "report.json"
    report.write_text("before")
    file = trace(tmp_path, "2023-11-16 18:15:46.6805900,8,2")
    assert run("serve-trace", "--trace", "absent.csv", "--json", report).exit_code == 2
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", mock.Mock(side_effect=full))
        done = run("serve-trace", "--trace", file, *TRACED, "--json", report)
    assert done.exit_code == 2 and "report.json' cannot be written: No space left on device" in done.stderr
    assert report.read_text() == "before" and set(tmp_path.iterdir()) == {report, file}
    assert run("serve-trace", "--trace", file, *TRACED, "--json", report).exit_code == 0
    assert json.loads(report.read_text())["generated_tokens"] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_that_takes_no_report_is_an_error(tmp_path: Path) -> None:
    """And remains a device."""
    file = trace(tmp_path, "2023-11-16 18:15:46.6805900,8,2")
    done = run("serve-trace", "--trace", file, *TRACED, "--json", "/dev/full")
    assert done.exit_code == 2 and "Error: the report '/dev/full' cannot be written: No space left" in done.stderr
    assert Path("/dev/full").is_char_device()


def test_a_report_is_written_to_the_standard_output(tmp_path: Path) -> None:
    file = trace(tmp_path, "2023-11-16 18:15:46.6805900,8,2")
    done = run("serve-trace", "--trace", file, *TRACED, "--json", "-")
    assert json.loads(done.stdout[done.stdout.index("{\n") :])["generated_tokens"] == 2


@pytest.mark.parametrize("size", ("0", "-1", "12 parsecs", "1.5GiB", "MiB"))
def test_a_memory_that_is_no_size_is_refused(size: str) -> None:
    done = run("generate", "--prompt", "x", "--memory", size)
    assert done.exit_code == 2 and "is no size" in done.stderr


def test_a_terminal_gets_no_commands_from_a_model() -> None:
    """Escape sequences are pictured; line ends and tabs stay."""
    assert "a\x1b[2J\n\tb\x07\x7f".translate(PICTURES) == "a\u241b[2J\n\tb\u2407\u2421"


def test_the_module_is_the_command() -> None:
    """``python -m dsv4``."""
    done = subprocess.run([sys.executable, "-m", "dsv4", "--help"], capture_output=True, text=True, check=True)
    assert "generate" in done.stdout and "serve-trace" in done.stdout and done.stdout.startswith("Usage: dsv4")
