"""A trace as load, on a clock of the test's own: who arrives when, who is served when, what the report sums up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from dsv4.errors import RequestError
from dsv4.model.context import Context
from dsv4.model.decoder import Outcome
from dsv4.scheduler import Request, Rows
from dsv4.serve.load import scaled, serve
from dsv4.serve.report import Spread
from dsv4.serve.server import Server
from tests.dsv4.serve.standin import StandIn


class StepClock:
    """A second passes with each step of the model; waiting passes what is asked for."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.waits: list[float] = []

    def now(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.seconds += seconds


class Timed(StandIn):
    clock: StepClock

    def forward(self, rows: Sequence[Rows], contexts: Mapping[int, Context]) -> Outcome:
        self.clock.seconds += 1
        return super().forward(rows, contexts)


def timed(**settings: int) -> tuple[Server, StepClock]:
    model = Timed(**settings)
    model.clock = StepClock()
    return Server(model), model.clock


def test_requests_arrive_by_the_clock_and_each_token_has_its_time() -> None:
    """Steps take a second: the second request, due at 1.5, starts with the step at 2; the third comes after a rest."""
    server, clock = timed()
    requests = [Request(0, 5, 3, 0.0), Request(1, 5, 2, 3.0), Request(2, 5, 1, 20.0)]
    served, seconds = serve(server, requests, speed_up=2.0, clock=clock)
    assert [one.times for one in served] == [[1.0, 2.0, 3.0], [3.0, 4.0], [11.0]]
    assert [one.arrival for one in served] == [0.0, 1.5, 10.0]
    assert clock.waits == [6.0] and seconds == 11.0
    assert not any(one.problem for one in served)


def test_what_is_refused_or_fails_is_said_and_the_rest_is_served() -> None:
    """One request is too long for the engine, one is in the step that fails."""
    server, clock = timed(fail_at=0)
    requests = [Request(0, 5, 3, 0.0), Request(1, 300, 9, 0.0), Request(2, 5, 2, 1.0)]
    served, _ = serve(server, requests, clock=clock)
    assert [one.problem.split(" above")[0] for one in served] == [
        "a step of the model failed: ArithmeticError: on purpose",
        "a context of 309 tokens is needed,",
        "",
    ]
    assert [one.times for one in served] == [[], [], [2.0, 3.0]]


@pytest.mark.parametrize("speed_up", (0.0, -1.0, float("nan"), float("inf")))
def test_a_speed_up_that_is_no_speed_is_refused(speed_up: float) -> None:
    server, clock = timed()
    with pytest.raises(RequestError, match="speed_up"):
        serve(server, [Request(0, 5, 3)], speed_up=speed_up, clock=clock)


def test_lengths_are_divided_until_the_longest_fits() -> None:
    """All by the same factor; a token stays. A trace that fits is left alone."""
    requests = [Request(0, 900, 100), Request(1, 40, 5), Request(2, 1, 1)]
    shorter, factor = scaled(requests, 100)
    assert factor == 10
    assert [(one.prompt_tokens, one.new_tokens) for one in shorter] == [(90, 10), (4, 1), (1, 1)]
    assert scaled(requests, 1000) == (requests, 1)


@pytest.mark.parametrize(
    ("seconds", "found"),
    [([], (0, 0, 0)), ([3.0], (3, 3, 3)), ([2.0, 1.0], (1, 2, 2)), (list(range(1, 101)), (50, 90, 99))],
    ids=("none", "one", "two", "a hundred"),
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    seconds: list[float], found: tuple[float, float, float]
) -> None:
    assert Spread.of(seconds) == Spread(*found)
