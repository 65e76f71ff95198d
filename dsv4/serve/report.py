"""What serving a trace took: times, throughput, bytes; as records for JSON, and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import attrs
from rich.table import Table

from dsv4.serve.build import Deployment
from dsv4.serve.load import Served
from dsv4.serve.server import Server

MIB = 1 << 20


@attrs.frozen
class Spread:
    """Percentiles of some seconds; 0 where there are none."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of a sample: the smallest value that so many percent do not exceed."""
        ordered = sorted(seconds) or [0.0]
        return cls(*(ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in (50, 90, 99)))


@attrs.frozen
class Report:
    """One run of a trace. Seconds, bytes, tokens a second.

    Attributes
    ----------
    first_token, between_tokens
        From a request's arrival to its first token; from one token to the next (0 for tokens of one step).
    workspace_held, workspace_peak, owners
        Bytes that the workspace holds (declared ones where an allocator places each tensor), most that were on loan
        at once, and the most of each owner.
    caches_held, caches_peak
        Bytes of the caches, and of the blocks taken at once at most.
    acceptance
        Share of the guessed tokens that were right; None without speculation.
    problems
        What was refused or failed, by place in the trace.
    """

    requests: int
    finished: int
    seconds: float
    prompt_tokens: int
    generated_tokens: int
    generated_per_second: float
    tokens_per_second: float
    first_token: Spread
    between_tokens: Spread
    evictions: int
    acceptance: float | None
    workspace_held: int
    workspace_peak: int
    owners: dict[str, int]
    caches_held: int
    caches_peak: int
    problems: dict[int, str]

    def record(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return attrs.asdict(self)


def report(served: Sequence[Served], seconds: float, server: Server, deployment: Deployment) -> Report:
    """Sum up a run of `dsv4.serve.load.serve`."""
    complete = [one for one in served if not one.problem]
    prompt = sum(one.request.prompt_tokens for one in complete)
    generated = sum(len(one.times) for one in served)
    snapshot = deployment.workspace.snapshot()
    return Report(
        requests=len(served),
        finished=len(complete),
        seconds=seconds,
        prompt_tokens=prompt,
        generated_tokens=generated,
        generated_per_second=generated / seconds,
        tokens_per_second=(prompt + generated) / seconds,
        first_token=Spread.of([one.times[0] - one.arrival for one in served if one.times]),
        between_tokens=Spread.of([after - before for one in served for before, after in pairwise(one.times)]),
        evictions=server.evictions,
        acceptance=server.acceptance.rate if server.model.drafts else None,
        workspace_held=deployment.workspace_bytes,
        workspace_peak=snapshot.peak_allocated,
        owners={name: one.peak for name, one in sorted(snapshot.owners.items())},
        caches_held=deployment.cache_bytes,
        caches_peak=sum(one.peak_nbytes for one in deployment.caches),
        problems={place: one.problem for place, one in enumerate(served) if one.problem},
    )


def tables(found: Report) -> Iterator[Table]:
    """The report as it is printed."""
    times = Table("", "p50", "p90", "p99", box=None, pad_edge=False)
    for name, spread in (("time to first token", found.first_token), ("between tokens", found.between_tokens)):
        times.add_row(name, *(f"{1000 * value:,.1f} ms" for value in attrs.astuple(spread)))
    yield times
    sums = Table("", "", box=None, pad_edge=False, show_header=False)
    sums.add_row("requests", f"{found.finished} of {found.requests} finished, {found.evictions} evictions")
    sums.add_row("tokens", f"{found.prompt_tokens:,} of prompts, {found.generated_tokens:,} generated")
    sums.add_row("time", f"{found.seconds:,.1f} s")
    sums.add_row(
        "throughput", f"{found.generated_per_second:,.1f} generated/s, {found.tokens_per_second:,.1f} with prompts"
    )
    if found.acceptance is not None:
        sums.add_row("guesses", f"{100 * found.acceptance:.1f} % right")
    yield sums
    memory = Table("memory", "held", "peak", box=None, pad_edge=False)
    memory.add_row("workspace", _mib(found.workspace_held), _mib(found.workspace_peak))
    for name, peak in sorted(found.owners.items(), key=lambda pair: -pair[1]):
        memory.add_row(f"  {name}", "", _mib(peak))
    memory.add_row("caches", _mib(found.caches_held), _mib(found.caches_peak))
    yield memory


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.2f} MiB"
