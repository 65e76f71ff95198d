"""What does not follow a workload's protocol is told so, in two lines, before any step has run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from tests.sweep.standin import Sums, SumsProgram, ThreeLeases, ThreeLeasesRunner, ThreeLeasesSession
from workspace.cli import main
from workspace.errors import ConfigError
from workspace.sweep import cell, execute
from workspace.sweep.plan import Replay
from workspace.sweep.protocol import ProtocolError, following
from workspace.sweep.session import find_workload, open_session, steps_of
from workspace.sweep.workload import Execution, Program, Runner, Session, Step, Workload

REPLAY = Replay("tests.sweep.standin:ThreeLeases", "small", None, "simulated", 2, 0)
MEMBERS = [
    (Workload, ThreeLeases(), ("models", "drivers", "open")),
    (Session, ThreeLeasesSession(0), ("description", "steps", "prepare")),
    (Runner, ThreeLeasesRunner, ("run", "close")),
    (Execution, Sums(), ("description", "prepare")),
    (Program, SumsProgram, ("run", "close")),
]


@attrs.define
class Without:
    """An object with one member hidden."""

    inner: Any
    hidden: str

    def __getattr__(self, name: str) -> Any:
        if name == self.hidden:
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize(("protocol", "made", "name"), [(*one[:2], name) for one in MEMBERS for name in one[2]])
def test_each_member_is_asked_for(protocol: type, made: Any, name: str) -> None:
    """By name, with the class that lacks it, the workload and the page; nothing is said of what is whole."""
    with pytest.raises(
        ProtocolError, match=f"'Without', as {protocol.__name__} of workload 'm:W', has no '{name}'"
    ) as e:
        following(protocol, Without(made, name), "m:W")
    assert "docs/workload.md" in e.value.remedy and str(e.value).count("has no") == 1


def test_what_follows_is_what_comes_back() -> None:
    session = open_session(REPLAY)
    assert following(Session, session, "m:W") is session


def test_a_workload_that_is_only_timed_needs_no_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found; to replay it is refused."""
    monkeypatch.delattr(ThreeLeases, "open")
    assert isinstance(find_workload(REPLAY.workload), ThreeLeases)
    with pytest.raises(ProtocolError, match="'ThreeLeases', as Workload of .*, has no 'open'"):
        open_session(REPLAY)


def test_a_method_that_takes_other_arguments_is_named() -> None:
    """With what it would be called with."""

    class Short(ThreeLeasesSession):
        def prepare(self, ws: Any) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(ProtocolError, match=r"another 'prepare': called with \(ws, mode, aux_streams, micro_batches\)"):
        following(Session, Short(0), "m:W")


def test_steps_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No steps at all, too; a mean over them would be of nothing."""
    session = open_session(REPLAY)
    assert [type(step) for step in steps_of(session, REPLAY)] == [Step, Step]
    monkeypatch.setattr(ThreeLeasesSession, "steps", lambda self, count: iter([(0, 16)]))
    with pytest.raises(ProtocolError, match="'tuple', as Step of"):
        steps_of(session, REPLAY)
    monkeypatch.setattr(ThreeLeasesSession, "steps", lambda self, count: iter([]))
    with pytest.raises(ConfigError, match="has no steps"):
        steps_of(session, REPLAY)


def nothing(*_: object) -> None:
    """What a method makes that forgot its return."""


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (ThreeLeases, "open"),
        (ThreeLeasesSession, "prepare"),
        (ThreeLeases, "execution"),
        (Sums, "prepare"),
    ],
)
def test_the_command_ends_in_two_lines(
    owner: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fault shows as late as in `prepare`, too; no cell counts as refused, and no report is written."""
    for cached in (cell.session_of, execute._execution, execute._reference):
        cached.cache_clear()
    monkeypatch.setattr(owner, method, nothing)
    options = "--workload", REPLAY.workload, "--jobs", "1", "--steps", "2", "--mode", "eager", "--execute", "1"
    done = CliRunner().invoke(main, ["sweep", *options, "--out", str(tmp_path)])
    assert done.exit_code == 2 and "'NoneType', as" in done.stderr and "docs/workload.md" in done.stderr
    assert "refused" not in done.output and not list(tmp_path.iterdir())
