"""Every token is scheduled once and in order, within the budget, and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import RequestError
from dsv4.scheduler import Request, Scheduler, Step

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=14)
LIMITS = st.tuples(st.integers(1, 24), st.integers(1, 8)).map(lambda pair: (max(pair), pair[1]))


def drain(scheduler: Scheduler) -> list[Step]:
    steps = []
    while (step := scheduler.step()) is not None:
        steps.append(step)
    return steps


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, limits=LIMITS, batches=st.lists(st.integers(0, 5), max_size=14))
def test_every_token_once_in_order_within_the_budget(
    lengths: list[tuple[int, int]], limits: tuple[int, int], batches: list[int]
) -> None:
    """Requests arrive in any portions between steps."""
    budget, seqs = limits
    scheduler = Scheduler(budget, seqs, 1000)
    arriving = [Request(i, prompt, new) for i, (prompt, new) in enumerate(lengths)]
    steps: list[Step] = []
    for portion in [*batches, len(arriving)]:
        for request in arriving[:portion]:
            scheduler.add(request)
        del arriving[:portion]
        step = scheduler.step()
        steps += [step] if step else []
    steps += drain(scheduler)

    assert scheduler.unfinished == 0
    computed = dict.fromkeys(range(len(lengths)), 0)
    sampled = dict.fromkeys(range(len(lengths)), 0)
    for index, step in enumerate(steps):
        assert step.index == index and 1 <= step.tokens <= budget and step.requests <= seqs
        assert step.tokens == sum(one.count for one in step.rows)
        assert step.prefill_tokens == sum(one.count for one in step.rows if one.prefill)
        assert [one.prefill for one in step.rows] == sorted(one.prefill for one in step.rows), "decode first"
        for one in step.rows:
            prompt, _ = lengths[one.request]
            assert one.start == computed[one.request]
            assert one.prefill == (one.start < prompt)
            assert one.end <= prompt if one.prefill else one.count == 1
            assert one.samples == (one.end >= prompt)
            computed[one.request] = one.end
            sampled[one.request] += one.samples
    assert computed == {i: prompt + new - 1 for i, (prompt, new) in enumerate(lengths)}
    assert sampled == {i: new for i, (_, new) in enumerate(lengths)}


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, limits=LIMITS)
def test_nobody_starves(lengths: list[tuple[int, int]], limits: tuple[int, int]) -> None:
    """A generating request has a token in every step, and prompts finish in the order they came."""
    budget, seqs = limits
    scheduler = Scheduler(budget, seqs, 1000)
    for i, (prompt, new) in enumerate(lengths):
        scheduler.add(Request(i, prompt, new))
    generating: set[int] = set()
    finished_prompts: list[int] = []
    left = {i: new for i, (_, new) in enumerate(lengths)}
    for step in drain(scheduler):
        present = {one.request for one in step.rows}
        assert generating <= present
        for one in step.rows:
            if one.samples:
                left[one.request] -= 1
                generating.add(one.request)
                if one.prefill:
                    finished_prompts.append(one.request)
                if left[one.request] == 0:
                    generating.remove(one.request)
    assert finished_prompts == sorted(finished_prompts)


def test_a_long_prompt_is_cut_to_what_decoding_leaves() -> None:
    scheduler = Scheduler(8, 4, 100)
    scheduler.add(Request(0, 3, 4))
    scheduler.add(Request(1, 20, 1))
    found = [[(one.request, one.start, one.count) for one in step.rows] for step in drain(scheduler)]
    assert found == [
        [(0, 0, 3), (1, 0, 5)],
        [(0, 3, 1), (1, 5, 7)],
        [(0, 4, 1), (1, 12, 7)],
        [(0, 5, 1), (1, 19, 1)],
    ]


def test_cancelled_requests_leave_the_others_alone() -> None:
    scheduler = Scheduler(4, 2, 100)
    for i in range(3):
        scheduler.add(Request(i, 4, 3))
    scheduler.step()
    scheduler.cancel(0)
    scheduler.cancel(2)
    assert [{one.request for one in step.rows} for step in drain(scheduler)] == [{1}] * 3
    with pytest.raises(RequestError, match="request 0 is not queued"):
        scheduler.cancel(0)


@pytest.mark.parametrize(
    ("request_", "needle"),
    [
        (Request(1, 0, 1), "prompt_tokens=0 is not a positive integer"),
        (Request(1, 1, -3), "new_tokens=-3"),
        (Request(1, 2.5, 1), "prompt_tokens=2.5"),  # type: ignore[arg-type]
        (Request(1, 90, 11), "context of 101 tokens, above max_model_len=100"),
        (Request(0, 1, 1), "request 0 is queued already"),
    ],
)
def test_a_bad_request_is_refused_and_the_rest_runs(request_: Request, needle: str) -> None:
    scheduler = Scheduler(8, 4, 100)
    scheduler.add(Request(0, 2, 2))
    with pytest.raises(RequestError, match=needle):
        scheduler.add(request_)
    assert scheduler.unfinished == 1
    assert sum(step.tokens for step in drain(scheduler)) == 3


@pytest.mark.parametrize("limits", [(0, 1, 1), (4, 8, 100), (4, True, 100), (4, 4, "long")])
def test_bad_limits_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(RequestError):
        Scheduler(*limits)
