"""Host time: each step's least over the replays, and the strategies of a setting in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.sweep.standin import ThreeLeasesRunner, ThreeLeasesSession
from workspace.errors import Unsupported
from workspace.sweep import host_time
from workspace.sweep.host_time import REPLAYS, HostTime, host_costs
from workspace.sweep.plan import Cell, Replay, cells
from workspace.sweep.result import HostCost, Refused
from workspace.sweep.workload import Step

REPLAY = Replay("tests.sweep.standin:ThreeLeases", "small", None, "simulated", 4, 0)
SAFE = {"caching": True, "event_fenced": True, "unfenced": False}


def clock(*took: float) -> Callable[[], int]:
    """Of which one interval after the other takes so many us."""

    def times() -> Iterator[int]:
        now = 0
        for us in took:
            yield now
            now += int(1000 * us)
            yield now

    return times().__next__


def timed(monkeypatch: pytest.MonkeyPatch, *replays: tuple[float, float]) -> HostTime:
    """Two steps that take so many us, replay by replay."""
    session = ThreeLeasesSession(0)
    host = HostTime(session, REPLAY, Cell("event_fenced", "eager", 1, True), False)
    monkeypatch.setattr(host_time.time, "thread_time_ns", clock(*(us for replay in replays for us in replay)))
    with torch.no_grad():
        for _ in replays:
            host.begin()
            for step in session.steps(2):
                host.run(step)
    monkeypatch.undo()
    host.close()
    return host


def costs(mode: str = "eager", strategies: tuple[str, ...] = tuple(SAFE)) -> dict[str, HostCost | Refused]:
    found = host_costs(REPLAY, cells(strategies, [mode], [1], [True]), SAFE)
    return {cell.strategy: cost for cell, cost in found.items()}


def test_a_busy_moment_in_one_replay_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one in each, where it meets another step."""
    quiet = timed(monkeypatch, (10, 30), (10, 30), (10, 30))
    busy = timed(monkeypatch, (10, 90), (25, 30), (40, 120))
    assert (quiet.us, busy.us) == (20, 20)
    assert (quiet.replays_us, busy.replays_us) == ((20, 20, 20), (50, 27.5, 80))


def test_a_step_that_always_takes_longer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    assert timed(monkeypatch, (10, 90), (25, 95), (40, 120)).us == 50


def test_the_strategies_of_a_setting_take_each_step_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`caching` twice, in an order that changes."""
    taken: list[tuple[int, str]] = []
    monkeypatch.setattr(ThreeLeasesRunner, "run", lambda self, step: taken.append((step.index, self.ws.strategy)))
    costs()
    turns = [taken[at : at + 4] for at in range(0, len(taken), 4)]
    assert [{index for index, _ in turn} for turn in turns] == [{0}, {1}, {2}, {3}] * REPLAYS
    assert all(sorted(name for _, name in turn) == ["caching", *sorted(SAFE)] for turn in turns)
    assert len({tuple(name for _, name in turn) for turn in turns}) > 1


def test_a_busy_spell_meets_all_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts for two steps of each replay, and no strategy's time says more of it than another's."""
    spell = [10.0] * 8 + [70.0] * 8
    monkeypatch.setattr(host_time.time, "thread_time_ns", clock(*spell * REPLAYS))
    found = costs()
    assert found["caching"] == HostCost(40, (40, 40, 40), 40)
    assert found["event_fenced"] == found["unfenced"] == HostCost(40, (40, 40, 40))


def test_caching_against_itself_shows_what_a_ratio_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spell that ends within a step sets it apart from its twin."""
    monkeypatch.setattr(host_time.time, "thread_time_ns", clock(*[10.0, 30.0] * 4 * REPLAYS))
    cost = costs(strategies=("caching",))["caching"]
    assert isinstance(cost, HostCost) and cost.again_us not in (None, cost.us)


def test_a_refusal_leaves_the_others_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, and in one, which is not run again."""
    refused = costs("wide")
    assert all(isinstance(cost, Refused) and cost.problem == "no wide regions here" for cost in refused.values())
    taken: list[int] = []
    run = ThreeLeasesRunner.run

    def refusing(self: ThreeLeasesRunner, step: Step) -> None:
        if self.ws.strategy == "event_fenced":
            taken.append(step.index)
            if step.index == 2:
                raise Unsupported("no third step", "run two")
        run(self, step)

    monkeypatch.setattr(ThreeLeasesRunner, "run", refusing)
    found = costs()
    assert isinstance(found["event_fenced"], Refused) and taken == [0, 1, 2]
    assert isinstance(found["caching"], HostCost) and isinstance(found["unfenced"], HostCost)
