"""Request traces: the CSV of the Azure LLM inference trace, or one generated with its statistics.

The quantiles below are those of the conversation trace of 2023 (19,366 requests in 58 minutes, CC-BY 4.0;
Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from dsv4.errors import TraceError
from dsv4.scheduler import Request

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"

MOST_TOKENS = 2**31 - 1
"""Of a prompt or a generation: what a position in 32 bits can count."""

PERCENTS = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 99.9, 100)
CONTEXT_TOKENS = (
    2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4098, 4142, 6179, 14050,
)  # fmt: skip
GENERATED_TOKENS = (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 540, 601, 954, 1000)
GAP_SECONDS = (
    2e-06, 0.000546, 0.00632, 0.01614, 0.03652, 0.06072, 0.08725, 0.1184, 0.1587, 0.2136, 0.2888, 0.4207,
    0.5652, 0.7493, 0.8897, 1.411, 4.315,
)  # fmt: skip


def read(path: str | Path) -> list[Request]:
    """Requests of a trace file, in its order; arrivals in seconds after the first.

    Raises
    ------
    TraceError
        The file is unreadable, empty, truncated or not such a trace; names the line, the value and the rule.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}", f"pass a CSV with the columns {HEADER}") from error
    if not lines or lines[0].strip() != HEADER:
        raise _refused(path, 1, lines[0] if lines else "", f"the first line must be {HEADER}")
    requests: list[Request] = []
    start = last = None
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split(",")
        if len(fields) != 3:
            raise _refused(path, number, line, "a line has three fields; the file may be cut off here")
        time = _time(path, number, fields[0])
        start, last = start or time, last or time
        if time < last:
            raise _refused(path, number, fields[0], f"arrivals must not go back in time, before {last}")
        last = time
        prompt, new = (_tokens(path, number, field) for field in fields[1:])
        requests.append(Request(len(requests), prompt, new, (time - start).total_seconds()))
    if not requests:
        raise _refused(path, 2, "", "there must be at least one request")
    return requests


def _time(path: str | Path, number: int, text: str) -> datetime:
    try:
        # The file has 100 ns digits; datetime keeps microseconds.
        return datetime.strptime(text[:26], "%Y-%m-%d %H:%M:%S.%f")
    except ValueError:
        raise _refused(path, number, text, "a time reads 2023-11-16 18:15:46.6805900") from None


def _tokens(path: str | Path, number: int, text: str) -> int:
    # Digits are counted first: int() takes only so many, with an error of its own.
    plain = text.isascii() and text.isdigit() and len(text) <= len(str(MOST_TOKENS))
    if not plain or not 1 <= int(text) <= MOST_TOKENS:
        raise _refused(path, number, text, f"a token count is an integer of 1 or more, up to {MOST_TOKENS}")
    return int(text)


def _refused(path: str | Path, line: int, value: str, rule: str) -> TraceError:
    return TraceError(
        f"{path}, line {line}: {value[:80]!r}: {rule}",
        "pass the complete CSV of the Azure LLM inference trace, or no trace for a generated one",
        path=str(path),
        line=line,
        value=value,
        rule=rule,
    )


def generate(seed: int, count: int = 20_000) -> list[Request]:
    """Requests whose lengths and gaps follow the quantiles above, whatever the seed and the count.

    The draws are stratified: one from each of `count` equal slices of the distribution, in random order.
    Lengths and gaps are independent, which they nearly are in the trace (correlation of the lengths: -0.11).
    """
    if count < 1:
        raise TraceError(f"a trace of {count} requests was asked for", "ask for 1 or more")
    draw = random.Random(seed)
    prompts = _draws(draw, CONTEXT_TOKENS, count)
    news = _draws(draw, GENERATED_TOKENS, count)
    arrivals = accumulate(_draws(draw, GAP_SECONDS, count - 1), initial=0.0)
    return [
        Request(i, round(prompt), round(new), arrival)
        for i, (prompt, new, arrival) in enumerate(zip(prompts, news, arrivals, strict=True))
    ]


def _draws(draw: random.Random, quantiles: tuple[float, ...], count: int) -> list[float]:
    values = [_quantile(quantiles, 100 * (i + draw.random()) / count) for i in range(count)]
    draw.shuffle(values)
    return values


def _quantile(quantiles: tuple[float, ...], percent: float) -> float:
    upper = min(bisect_right(PERCENTS, percent), len(PERCENTS) - 1)
    below, above = PERCENTS[upper - 1], PERCENTS[upper]
    share = (percent - below) / (above - below)
    return quantiles[upper - 1] + share * (quantiles[upper] - quantiles[upper - 1])
