"""Host time: each step's least over the replays, whatever else the machine did in one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.sweep.standin import ThreeLeasesSession
from workspace.sweep import host_time
from workspace.sweep.host_time import HostTime
from workspace.sweep.plan import Cell, Replay

REPLAY = Replay("tests.sweep.standin:ThreeLeases", "small", None, "simulated", 2, 0)


def timed(monkeypatch: pytest.MonkeyPatch, *replays: tuple[float, float]) -> HostTime:
    """Two steps that take so many us, replay by replay."""
    session = ThreeLeasesSession(0)
    host = HostTime(session, REPLAY, Cell("event_fenced", "eager", 1, True), False, list(session.steps(2)))

    def clock() -> Iterator[int]:
        now = 0
        for took in (took for taken in replays for took in taken):
            yield now
            now += int(1000 * took)
            yield now

    monkeypatch.setattr(host_time.time, "thread_time_ns", clock().__next__)
    with torch.no_grad():
        for _ in replays:
            host.replay()
    monkeypatch.undo()
    host.close()
    return host


def test_a_busy_moment_in_one_replay_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one in each, where it meets another step."""
    quiet = timed(monkeypatch, (10, 30), (10, 30), (10, 30))
    busy = timed(monkeypatch, (10, 90), (25, 30), (40, 120))
    assert (quiet.us, busy.us) == (20, 20)
    assert (quiet.replays_us, busy.replays_us) == ((20, 20, 20), (50, 27.5, 80))


def test_a_step_that_always_takes_longer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    assert timed(monkeypatch, (10, 90), (25, 95), (40, 120)).us == 50
