"""How a request's tokens are chosen from the logits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection

import attrs
import torch

from dsv4.errors import RequestError
from dsv4.serve.errors import StepError


@attrs.frozen
class Sampling:
    """What a request asks for.

    The n-th token depends on the logits, the settings and (seed, n) alone. The logits, in turn, do not depend on the
    requests beside it in float32. In bfloat16, or with packed caches, a step of another shape rounds differently, so
    that other requests beside it may change its tokens.

    Attributes
    ----------
    max_new_tokens
        Tokens to generate at most, 1 or more.
    temperature
        Logits are divided by it; 0 takes the largest one, the first of equal ones.
    top_p
        The smallest set of most likely tokens whose probabilities reach this sum is drawn from; in (0, 1].
    seed
        Of the draws.
    stop_tokens
        Ids that end the generation; the id itself is the last token.

    Raises
    ------
    RequestError
        A value is outside its range.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def __attrs_post_init__(self) -> None:
        for name, (holds, rule, remedy) in RULES.items():
            value = getattr(self, name)
            if not holds(value):
                raise RequestError(f"{name}={value!r} is no {rule}", remedy, **{name: value})


def _whole(value: object) -> bool:
    return type(value) is int


def _number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


RULES: dict[str, tuple[Callable[..., bool], str, str]] = {
    "max_new_tokens": (
        lambda value: _whole(value) and value >= 1,
        "integer of 1 or more",
        "ask for one token at least",
    ),
    "temperature": (
        lambda value: _number(value) and value >= 0,
        "finite number of 0 or more",
        "pass 0 for the likeliest token, 1 for the model's own probabilities",
    ),
    "top_p": (
        lambda value: _number(value) and 0 < value <= 1,
        "number above 0 and up to 1",
        "pass 1 to draw from all tokens, 0.9 to leave out the least likely ones",
    ),
    "seed": (_whole, "integer", "pass an int"),
    "stop_tokens": (
        lambda value: isinstance(value, Collection) and all(map(_whole, value)),
        "set of token ids",
        "pass integers",
    ),
}


def choose(logits: torch.Tensor, sampling: Sampling, index: int) -> int:
    """The request's token number `index` (from 0), of logits [V] in the host's memory.

    Raises
    ------
    StepError
        No token is likeliest: a logit is NaN or infinite, or all are minus infinity.
    """
    largest = float(logits.max())  # NaN if one of them is
    if not math.isfinite(largest):
        raise StepError(
            f"the largest logit of token {index} is {largest}: it says nothing about the next token",
            "look for what made it in the weights, or in the model's precision",
            index=index,
            largest=largest,
        )
    if sampling.temperature == 0:
        return int(logits.argmax())
    # The largest becomes 0 before the division, which no temperature makes infinite.
    probabilities = ((logits.double() - largest) / sampling.temperature).softmax(0)
    # Stable, so that equal probabilities keep the order of their ids.
    ordered, ids = probabilities.sort(descending=True, stable=True)
    reached = ordered.cumsum(0)
    kept = int((reached < sampling.top_p).sum()) + 1
    kept = min(kept, len(ids))
    at = random.Random(f"{sampling.seed} {index}").random() * float(reached[kept - 1])
    return int(ids[min(int((reached[:kept] <= at).sum()), kept - 1)])
