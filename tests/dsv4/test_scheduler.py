"""Every token is scheduled once and in order, within the budget, and nobody starves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.errors import NoRoom, RequestError
from dsv4.scheduler import Request, Rows, Scheduler, Step

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
        (Request(1, 90, 11), "context of 101 tokens is needed, above max_model_len=100"),
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


class Shelf:
    """Room for so many tokens in all."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.held: dict[int, int] = {}

    def take(self, rows: Rows) -> bool:
        others = sum(tokens for request, tokens in self.held.items() if request != rows.request)
        if others + rows.end > self.tokens:
            return False
        self.held[rows.request] = rows.end
        return True

    def free(self, request: int) -> None:
        self.held.pop(request, None)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, limits=LIMITS, room=st.integers(72, 150), seed=st.integers(0, 99), guessed=st.integers(0, 3))
def test_every_request_ends_however_little_room_there_is(
    lengths: list[tuple[int, int]], limits: tuple[int, int], room: int, seed: int, guessed: int
) -> None:
    """Evicted requests compute all their tokens again; drafts are accepted at random; each step feeds known tokens."""
    draw, shelf = random.Random(seed), Shelf(room)
    scheduler = Scheduler(*limits, 1000, shelf)
    for i, (prompt, new) in enumerate(lengths):
        scheduler.add(Request(i, prompt, new))
    known = {i: prompt for i, (prompt, _) in enumerate(lengths)}
    computed = dict.fromkeys(known, 0)
    while (step := scheduler.step()) is not None:
        assert step.tokens <= limits[0] and step.requests <= limits[1]
        for one in step.rows:
            assert one.start in (computed[one.request], 0), "in order, or again from the start"
            assert one.end <= shelf.held[one.request]
            drafts = max(0, one.end - known[one.request])
            assert drafts <= guessed
            held = draw.randint(1, one.count) if drafts else one.count
            if drafts:
                scheduler.verified(one.request, held)
            computed[one.request] = one.start + held
            known[one.request] = max(known[one.request], computed[one.request] + one.samples)
            prompt, new = lengths[one.request]
            if known[one.request] == prompt + new:
                shelf.free(one.request)
            elif one.samples:
                scheduler.draft(one.request, guessed)
    assert known == {i: prompt + new for i, (prompt, new) in enumerate(lengths)}
    assert scheduler.unfinished == 0 and not shelf.held


def test_the_last_to_start_is_evicted_and_comes_back_first() -> None:
    """Room for 10 tokens: the second request makes way for the first, and starts again before the third."""
    shelf = Shelf(10)
    scheduler = Scheduler(8, 4, 100, shelf)
    for i in range(3):
        scheduler.add(Request(i, 4, 4))
    shown = []
    while (step := scheduler.step()) is not None:
        shown.append([(one.request, one.start, one.count) for one in step.rows])
        for one in step.rows:
            if one.end == 7:
                shelf.free(one.request)
    first = [[(0, 0, 4), (1, 0, 4)], [(0, 4, 1), (1, 4, 1)], [(0, 5, 1)], [(0, 6, 1)]]
    assert shown[:5] == [*first, [(1, 0, 6), (2, 0, 2)]]
    assert scheduler.evictions == 1, "the third waits with what it holds"
    assert shown[-1] == [(2, 6, 1)]


def test_rows_that_find_no_room_are_an_error() -> None:
    """Rather than a step without rows, for ever. It names the oldest request; without that one the next begins."""
    scheduler = Scheduler(8, 4, 100, Shelf(3))
    scheduler.add(Request(0, 4, 4))
    scheduler.add(Request(1, 2, 1))
    with pytest.raises(NoRoom, match=r"request 0 finds no room .*\(2 unfinished here\)") as refused:
        scheduler.step()
    assert refused.value.request == 0
    scheduler.cancel(0)
    step = scheduler.step()
    assert step is not None and [one.request for one in step.rows] == [1]


def test_drafts_leave_every_other_request_its_token() -> None:
    """A budget of 4 for three requests has room for one guess; the request's own end cuts it, too."""
    scheduler = Scheduler(4, 3, 100)
    for i, new in enumerate((2, 9, 9)):
        scheduler.add(Request(i, 1, new))
    scheduler.step()
    for i in range(3):
        scheduler.draft(i, 5)
    step = scheduler.step()
    assert step is not None
    assert [(one.request, one.count, one.prefill) for one in step.rows] == [(0, 1, False), (2, 1, False), (1, 2, True)]
