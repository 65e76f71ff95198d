"""Somebody else's strategy runs the suite by its name, and one that breaks the rule is found out."""

from __future__ import annotations

import io
from collections import UserDict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from workspace.block import Block
from workspace.errors import UnknownStrategy
from workspace.request import Request
from workspace.strategies.event_fenced import EventFenced
from workspace.streams import Stream
from workspace.testing import all_scenarios, cells, run_contract


class Careful(EventFenced):
    """Another name for a strategy that keeps the rule."""

    name = "careful"


class Hasty(EventFenced):
    """Hands out the block whose last use is the latest, whoever still reads it."""

    name = "hasty"

    def _search(self, request: Request, stream: Stream) -> Block:
        for block in [block for blocks in self.pool.free.values() for block in blocks]:
            if block.nbytes >= request.nbytes:
                found = self.pool.take(block, request.nbytes, self.home(stream))
                found.uses, found.events = {}, None
                return found
        return super()._search(request, stream)


class Raising(EventFenced):
    """Has a fault on any stream but the first, which another file's code raises."""

    name = "raising"

    def _search(self, request: Request, stream: Stream) -> Block:
        if stream.key != 1:
            return UserDict({0: super()._search(request, stream)})[stream.key]  # the line that is named
        return super()._search(request, stream)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that register a strategy each."""
    loaded: dict[str, Any] = {"careful": Careful, "hasty": Hasty, "raising": Raising}
    points = [EntryPoint(name, f"{__name__}:{name}", "workspace.strategies") for name in loaded]
    monkeypatch.setattr(EntryPoint, "load", lambda self: loaded[self.name])
    monkeypatch.setattr("workspace.registry.entry_points", lambda group: points if group.endswith("strategies") else [])


SOME = ("a1", "a2", "a8-nested", "d5", "d9", "f1")


@pytest.mark.usefixtures("installed")
def test_careful_strategy_passes() -> None:
    """A strategy by name keeps what it is not exempt from, and its controls fail."""
    exempt = {name: "not part of this test" for name in all_scenarios() if name not in SOME}
    report = run_contract("careful", exempt)
    assert not report.broken, str(report)
    assert len(report.kept) == sum(1 + len(all_scenarios()[name].seams) for name in SOME)


@pytest.mark.usefixtures("installed")
def test_hasty_strategy_is_found_out() -> None:
    """A strategy without fences is reported scenario by scenario, with the wrong bytes and the schedule."""
    exempt = {name: "not part of this test" for name in all_scenarios() if name not in SOME}
    report = run_contract("hasty", exempt, controls=False)
    assert {"a1-hasty", "d5-hasty"} <= report.broken.keys()
    assert "bytes are not 17" in report.broken["a1-hasty"] and "UNSAFE" in report.broken["a1-hasty"]
    assert "f1-hasty" in report.kept


@pytest.mark.usefixtures("installed")
def test_a_strategy_that_raises_is_broken_there_and_the_rest_runs() -> None:
    """With the scenario, the exception and the innermost line of the strategy's file, in a control as well."""
    exempt = {name: "not part of this test" for name in all_scenarios() if name not in SOME}
    report = run_contract("raising", exempt)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = 1 + next(number for number, text in enumerate(lines) if text.endswith("# the line that is named"))
    raised = f"raised KeyError: 2 at {Path(__file__).name}:{line}"
    assert report.broken["a2-raising"] == f"a2 under 'raising' {raised}"
    assert report.broken["a2-raising-without-fence"] == f"a2 under 'raising' without 'fence' {raised}"
    assert {"a1-raising", "f1-raising"} <= set(report.kept)


class Terminal(io.StringIO):
    """What a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("installed")
def test_a_terminal_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line as each cell ends, on the standard error stream; a file or a pipe gets none."""
    exempt = {name: "not part of this test" for name in all_scenarios() if name not in ("d5", "f1")}
    for seen, lines in ((Terminal(), ["[1/2] d5-hasty: broken", "[2/2] f1-hasty: kept"]), (io.StringIO(), [])):
        monkeypatch.setattr("sys.stderr", seen)
        run_contract("hasty", exempt, controls=False)
        assert seen.getvalue().splitlines() == lines


def test_a_strategy_that_nobody_registered_keeps_nothing() -> None:
    """A name with a typo is refused: its controls would all fail, and count as kept."""
    with pytest.raises(UnknownStrategy, match="carefull"):
        run_contract("carefull")


@pytest.mark.usefixtures("installed")
def test_exemption_needs_a_reason() -> None:
    """An exemption without a reason, or of no scenario, is refused."""
    with pytest.raises(ValueError, match="no reason"):
        cells("careful", {"a1": " "})
    with pytest.raises(ValueError, match="no such scenario"):
        cells("careful", {"a99": "because"})
