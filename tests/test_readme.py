"""The README's code runs, its commands exist, and its figures are those of the results it names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_examples_run_in_order() -> None:
    """The code blocks, run one after the other, print what an ordered run prints."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    code = "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, verdict, race, *report, last = done.stdout.splitlines()
    assert (first, last) == (str(2.0 * 64 * 128), str(4.0 * 8 * 3))
    assert verdict == "UNSAFE" and race.startswith("race on") and any("zero_" in line for line in report)


def test_page_on_sleep_runs() -> None:
    """The code of the page on sleep and staging uploads what it says."""
    page = (ROOT / "docs/sleep.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[3, 4]"


def test_commands_are_targets() -> None:
    """Every make command in the README is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b", TEXT)) <= targets


def test_paths_exist() -> None:
    """Every path of the tree that the README names is there."""
    for path in re.findall(r"\b(?:workspace|benchmarks|tests|dsv4)/[\w./-]*\w", TEXT):
        assert (ROOT / path).exists(), path
