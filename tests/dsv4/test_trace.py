"""The generated trace has the real one's statistics; a bad file is refused by line, value and rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4.errors import TraceError
from dsv4.scheduler import Request
from dsv4.serve.load import scaled
from dsv4.trace import HEADER, MOST_TOKENS, generate, read

REAL = Path(__file__).parents[3] / "shared" / "data" / "AzureLLMInferenceTrace_conv.csv"

# p50, p90, p99 of the real trace.
PUBLISHED = {
    "prompt_tokens": (1020, 2734.5, 4142),
    "new_tokens": (129, 424, 601),
    "gap": (0.118424, 0.420656, 0.889671),
}


def percentiles(requests: list[Request]) -> dict[str, tuple[float, ...]]:
    arrivals = [request.arrival for request in requests]
    columns = {
        "prompt_tokens": [request.prompt_tokens for request in requests],
        "new_tokens": [request.new_tokens for request in requests],
        "gap": [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)],
    }
    found = {}
    for name, values in columns.items():
        values.sort()
        found[name] = tuple(values[round(share * (len(values) - 1))] for share in (0.5, 0.9, 0.99))
    return found


@pytest.mark.parametrize(("seed", "count"), [(0, 20_000), (1, 20_000), (7, 1_000), (123, 19_366)])
def test_generated_statistics_are_within_a_tenth(seed: int, count: int) -> None:
    requests = generate(seed, count)
    assert len(requests) == count
    for name, found in percentiles(requests).items():
        assert found == pytest.approx(PUBLISHED[name], rel=0.1), name


def test_the_seed_decides_the_trace() -> None:
    assert generate(3, 50) == generate(3, 50)
    assert generate(3, 50) != generate(4, 50)


def test_one_request_is_a_trace() -> None:
    assert [request.arrival for request in generate(0, 1)] == [0.0]
    with pytest.raises(TraceError, match="0 requests"):
        generate(0, 0)


@pytest.mark.skipif(not REAL.exists(), reason=f"the real trace is not at {REAL}")
def test_the_real_trace_reads_and_has_the_published_statistics() -> None:
    requests = read(REAL)
    assert len(requests) == 19_366
    assert requests[0] == Request(0, 374, 44, 0.0)
    for name, found in percentiles(requests).items():
        assert found == pytest.approx(PUBLISHED[name], rel=0.005), name


LINES = (HEADER, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109")


def write(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("\r\n".join(lines))
    return file


def test_a_file_gives_its_requests(tmp_path: Path) -> None:
    assert read(write(tmp_path, *LINES)) == [Request(0, 374, 44, 0.0), Request(1, 396, 109, 4.314579)]


@pytest.mark.parametrize(
    ("lines", "line", "rule"),
    [
        ((), 1, "the first line must be"),
        (("time,prompt,output", "1,2,3"), 1, "the first line must be"),
        ((HEADER,), 2, "at least one request"),
        ((*LINES, "2023-11-16 18:15:51.2224670,8"), 4, "cut off"),
        ((*LINES, "2023-11-16 18:1"), 4, "cut off"),
        ((*LINES, "2023-11-16 18:1,5,6"), 4, "a time reads"),
        ((*LINES, "2023-11-16 18:15:46.0000000,5,6"), 4, "back in time"),
        ((*LINES, "2023-11-16 18:15:52.0000000,5,"), 4, "an integer of 1 or more"),
        ((*LINES, "2023-11-16 18:15:52.0000000,0,6"), 4, "an integer of 1 or more"),
        ((*LINES, "2023-11-16 18:15:52.0000000,-5,6"), 4, "an integer of 1 or more"),
        ((*LINES, "2023-11-16 18:15:52.0000000,many,6"), 4, "'many': a token count is an integer"),
        ((*LINES, "2023-11-16 18:15:52.0000000,nan,6"), 4, "'nan': a token count is an integer"),
        ((*LINES, f"2023-11-16 18:15:52.0000000,5,{MOST_TOKENS + 1}"), 4, "'2147483648': .*up to 2147483647"),
        ((*LINES, f"2023-11-16 18:15:52.0000000,{'9' * 400},6"), 4, "'9{80}': .*up to 2147483647"),
        ((*LINES, f"2023-11-16 18:15:52.0000000,5,{'9' * 5000}"), 4, "'9{80}': .*up to 2147483647"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: tuple[str, ...], line: int, rule: str) -> None:
    with pytest.raises(TraceError, match=f"line {line}: .*{rule}") as refused:
        read(write(tmp_path, *lines))
    assert refused.value.fields["line"] == line


def test_the_largest_counts_are_read_and_can_be_served_shortened(tmp_path: Path) -> None:
    """The bound is one that lengths can be divided at."""
    requests = read(write(tmp_path, *LINES, f"2023-11-16 18:15:52.0000000,{MOST_TOKENS},{MOST_TOKENS}"))
    assert requests[-1].prompt_tokens == requests[-1].new_tokens == MOST_TOKENS
    shorter, factor = scaled(requests, 64)
    assert factor == 2 * MOST_TOKENS / 64
    assert [(one.prompt_tokens, one.new_tokens) for one in shorter] == [(1, 1), (1, 1), (32, 32)]


def test_an_unreadable_file_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "binary.csv")
