"""The code of the README and the pages runs, their commands and links exist, their figures are those of the results."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import dsv4.cli
import workspace.cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)#]*)(?:#([^)]*))?\)")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def ran(code: str) -> list[str]:
    """The lines that a program prints, run in the root of the clone."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def code_of(text: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


def test_examples_run_in_order() -> None:
    """The code blocks, run one after the other, print what an ordered run prints."""
    first, verdict, race, *report, last = ran(code_of(TEXT))
    assert (first, last) == (str(2.0 * 64 * 128), str(4.0 * 8 * 3))
    assert verdict == "UNSAFE" and race.startswith("race on") and any("zero_" in line for line in report)


@pytest.mark.parametrize(("page", "printed"), [("sleep", "[3, 4]"), ("safety", "32.0 SAFE")])
def test_pages_run(page: str, printed: str) -> None:
    """What the page says its code prints; the pages on porting and workloads have tests beside their examples."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    assert ran(code_of(text)) == [printed] and f"# {printed}" in text


GROUPS = {"workspace": workspace.cli.main, "dsv4": dsv4.cli.main}
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, in indented blocks and inline, without variables that are set."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for line in [*re.findall(r"^    (.*)$", text, re.MULTILINE), *re.findall(r"`([^`]*)`", text)]:
        if re.match(r"([A-Z_]+=\S+ )*(python|make|workspace|dsv4|torchrun)(\s|$)", line):
            words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
            if words[0] == "make" or len(words) > 1:
                yield words


def wrong(words: list[str]) -> list[str]:
    """What a command names and there is not: targets, modules, commands and options of both command lines."""
    if words[0] == "make":
        return [word for word in words[1:] if word not in TARGETS]
    if "-m" in words:
        words = words[words.index("-m") + 1 :]
        if importlib.util.find_spec(words[0]) is None:
            return words[:1]
    if words[0] not in GROUPS:
        return []
    shown = CliRunner().invoke(GROUPS[words[0]], [*words[1:2], "--help"])
    options = [word for word in words[2:] if word.startswith("--") and word not in shown.output]
    return [*([] if shown.exit_code == 0 else words[1:2]), *options]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    """With their targets, modules and options."""
    assert [words for words in commands(page.read_text(encoding="utf-8")) if wrong(words)] == []


def test_a_command_that_is_none_is_noticed() -> None:
    """The control; and the README's commands are found."""
    for line in ("make swep", "python -m benchmark", "workspace swep", "X=1 dsv4 generate --promt a"):
        (words,) = commands(f"Run `{line}`.")
        assert wrong(words), line
    found = list(commands(TEXT))
    assert ["make", "sweep"] in found and any("serve-trace" in words for words in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file or folder, and to a heading of it."""
    for target, heading in LINK.findall(page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        if heading:
            found = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in found], heading


def test_paths_exist() -> None:
    """Every path of the tree that the README names is there."""
    for path in re.findall(r"\b(?:workspace|benchmarks|tests|dsv4)/[\w./-]*\w", TEXT):
        assert (ROOT / path).exists(), path


def unknown(claim: str, page: Path) -> set[str]:
    """Figures of a claim that none of the files it links has."""
    files = [page.parent / target for target, _ in LINK.findall(claim)]
    assert files, claim
    known = {one for file in files for one in NUMBER.findall(file.read_text(encoding="utf-8"))}
    return set(NUMBER.findall(LINK.sub("", claim))) - known


def claims() -> list[str]:
    """Of the README: the rows of the table of results, and what is said of missed targets."""
    part = TEXT[TEXT.index("## Measured") : TEXT.index("All other figures")]
    missed = part[part.index("One target") :].split("\n\n")[0].split(". ")
    return [row.split("|", 2)[2] for row in part.splitlines() if row.startswith("|") and "](" in row] + missed


@pytest.mark.parametrize("claim", claims(), ids=lambda claim: claim.strip()[:40])
def test_figures_are_those_of_the_results(claim: str) -> None:
    """Digit by digit; another figure is noticed."""
    assert unknown(claim, README) == set()
    first = NUMBER.search(claim)
    assert first is not None and unknown(claim.replace(first[0], "0.12345", 1), README) == {"0.12345"}


def test_figures_of_the_page_on_strategies() -> None:
    """Those of the sections that quote results."""
    page = ROOT / "docs/strategies.md"
    text = page.read_text(encoding="utf-8")
    for start, end in (("## Memory", "## What a sweep shows"), ("`workspace sweep --driver cuda`", "## Settings")):
        claim = re.sub(r"`[^`]*`", "", text[text.index(start) : text.index(end)])
        assert unknown(re.sub(r"\[h200/sweep\]\(.*?\)", "", claim), page) == set()
