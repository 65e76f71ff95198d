"""Paired ratios and their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

Z = 1.959964
"""Of a two-sided interval of 95%."""


def paired(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Median of the pairs' ratios, and its 95% interval by order statistics: no assumption about their distribution."""
    ratios = sorted(one / other for one, other in zip(over, under, strict=True))
    count = len(ratios)
    reach = Z * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach) - 1)
    high = min(count - 1, math.ceil(count / 2 + reach))
    return median(ratios), ratios[low], ratios[high]
