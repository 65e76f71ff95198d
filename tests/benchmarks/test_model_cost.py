"""The cost of a prefill is measured on the model as it is."""

from __future__ import annotations

import pytest

from benchmarks.model_cost import apart, exponent, prefill_cost
from dsv4.model.presets import of_ratio


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_an_exponent_is_the_power_that_values_follow(power: float) -> None:
    """Whatever the factor."""
    sizes = [512, 1024, 2048, 4096]
    assert exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)


def test_costs_are_of_the_prefill() -> None:
    """Scratch follows the tokens; time and memory are seen."""
    small, large = (apart(prefill_cost, of_ratio(0), tokens) for tokens in (256, 512))
    assert large.leased == 2 * small.leased > 0
    assert small.seconds > 0 and large.resident > 0
