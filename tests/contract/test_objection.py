"""What a bench holds against a scenario: a race and what was not modelled, but not that it is about no operation."""

from __future__ import annotations

import pytest
import torch

from workspace.testing.bench import BLOCK
from workspace.testing.failure import ContractBroken
from workspace.testing.simulated import SimulatedBench


def test_a_scenario_may_be_about_no_operation() -> None:
    """A refusal, say: the device cannot call it SAFE, and nothing speaks against it."""
    bench = SimulatedBench("event_fenced", None)
    bench.no_race()
    assert bench.verdict() == "UNKNOWN"


def test_a_race_is_held_against_it() -> None:
    """The control, by what is said of the race itself; where nobody judges, nothing is."""
    for judged in (True, False):
        bench = SimulatedBench("event_fenced", None, judged=judged)
        (side,) = bench.streams(1)
        with torch.no_grad(), bench.ws.on(bench.main):
            one = bench.allocate(64)
            bench.fill(one, 1)
            bench.no_race()
            bench.fill(one, 2, side)
        if judged:
            with pytest.raises(ContractBroken, match="UNSAFE.*(?s:.)*fill 2"):
                bench.no_race()
        else:
            bench.no_race()


def test_what_was_not_modelled_is_held_against_it() -> None:
    """Whether anything was shown or not."""
    bench = SimulatedBench("event_fenced", None)
    bench.device.unknown("an opaque kernel")
    with pytest.raises(ContractBroken, match="UNKNOWN: an opaque kernel"):
        bench.no_race()


def test_a_late_access_is_held_against_it() -> None:
    """A tensor that is used after its bytes were lent again: in order, and wrong."""
    bench = SimulatedBench("event_fenced", None)
    with torch.no_grad(), bench.ws.on(bench.main):
        kept = []
        for value in (0, 1):
            with bench.ws.lease(BLOCK, N=64) as lease:
                kept.append(lease.data)
                bench.fill(lease.data, value)
        bench.no_race()
        bench.device.launch("late fill", writes=kept[:1])
    with pytest.raises(ContractBroken, match="UNSAFE: late access(?s:.)*late fill"):
        bench.no_race()
