"""Tokens by seed and place: greedy, by temperature, from a nucleus."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from dsv4.errors import RequestError
from dsv4.serve.errors import StepError
from dsv4.serve.sampling import Sampling, choose

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 2.0])


def counted(count: int = 1000, logits: torch.Tensor = LOGITS, **settings: Any) -> Counter[int]:
    sampling = Sampling(**settings)
    return Counter(choose(logits, sampling, index) for index in range(count))


def test_temperature_0_takes_the_largest_logit_whatever_the_seed() -> None:
    assert counted(10, seed=3) == {int(LOGITS.argmax()): 10}


@pytest.mark.parametrize("temperature", (0.5, 1.0, 3.0))
def test_draws_follow_the_softmax_of_the_tempered_logits(temperature: float) -> None:
    """Frequencies of 1,000 draws lie within four standard deviations of the probabilities."""
    wanted = (LOGITS.double() / temperature).softmax(0)
    found = counted(temperature=temperature)
    for token, probability in enumerate(wanted.tolist()):
        spread = (1000 * probability * (1 - probability)) ** 0.5
        assert abs(found[token] - 1000 * probability) <= 4 * spread


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1: 0.7 needs two tokens, a little more needs three; their ratio stays."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert set(counted(logits=logits, temperature=1.0, top_p=0.3)) == {1}
    two = counted(logits=logits, temperature=1.0, top_p=0.69)
    assert set(two) == {1, 3} and 1.1 < two[1] / two[3] < 1.6
    assert set(counted(logits=logits, temperature=1.0, top_p=0.75)) == {1, 2, 3}
    assert set(counted(logits=logits, temperature=1.0)) == {0, 1, 2, 3}


def test_one_token_with_all_the_probability_is_the_only_draw() -> None:
    """Also where the sum never reaches top_p by rounding."""
    logits = torch.full((1000,), -1e9)
    logits[7] = 0
    assert counted(50, logits=logits, temperature=1.0) == {7: 50}


def test_a_seed_and_a_place_decide_the_draw() -> None:
    """Another seed gives other tokens; the same one the same."""
    tokens = [[choose(LOGITS, Sampling(temperature=1.0, seed=seed), i) for i in range(40)] for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len(set(tokens[0])) > 1


@pytest.mark.parametrize("temperature", (1e-3, 1e-300, 1e-310, 5e-324))
@pytest.mark.parametrize("logits", ([0.0, 3.0, 1.0], [5.0, 3.0, 1.0], [-9.0, -8.0, float("-inf")]), ids=str)
def test_a_tiny_temperature_takes_the_largest_logit(temperature: float, logits: list[float]) -> None:
    """Also one that no logit can be divided by."""
    largest = logits.index(max(logits))
    assert counted(20, torch.tensor(logits), temperature=temperature) == {largest: 20}


@pytest.mark.parametrize("temperature", (0.0, 1e-310, 1.0))
@pytest.mark.parametrize(
    ("logits", "says"),
    [
        ([float("nan")] * 4, "is nan"),
        ([1.0, float("nan"), 2.0], "is nan"),
        ([1.0, float("inf")], "is inf"),
        ([float("-inf")] * 3, "is -inf"),
    ],
    ids=str,
)
def test_logits_without_a_largest_one_are_refused(temperature: float, logits: list[float], says: str) -> None:
    with pytest.raises(StepError, match=f"largest logit of token 3 {says}"):
        choose(torch.tensor(logits), Sampling(temperature=temperature), 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_p": float("nan")},
        {"seed": 0.5},
        {"stop_tokens": frozenset(["a"])},
        {"stop_tokens": 3},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(RequestError, match=name):
        Sampling(**settings)
