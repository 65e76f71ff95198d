"""The decode step under each strategy, in each run mode, strategies step by step in turn."""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.decode_step.interval import paired
from benchmarks.decode_step.model import BASELINE, IDIOM, Bench

AGAIN = f"{BASELINE} (again)"
"""The baseline against itself: what the method cannot tell apart."""

POOLS = ("event_fenced", "per_stream", "unfenced")
NAMES = {
    "eager": (BASELINE, AGAIN, IDIOM, "upstream", "caching", *POOLS),
    "wide": (BASELINE, AGAIN, "upstream", "caching", *POOLS),
    "narrow": (BASELINE, AGAIN, "upstream", "caching", *POOLS),
    "full": (BASELINE, AGAIN, "upstream", "caching", *POOLS),
}
PAIR = ("event_fenced", "event_fenced (again)", "unfenced")
"""What is told apart to 1%: it takes an interval of the first two within 0.5%."""

WARM_UP = 12
FIGURES = ("step_us", "host_us", "device_us")


def measure(bench: Bench, mode: str, rounds: int) -> dict[str, Any]:
    """Samples of each strategy by round, counts of one step, and ratios with their 95% intervals."""
    return _measured(bench, NAMES[mode], mode, rounds)


def pair(bench: Bench, rounds: int) -> dict[str, Any]:
    """The safe pool and the unsafe one alone, eagerly, and the safe one against itself."""
    return _measured(bench, PAIR, "eager", rounds)


def _measured(bench: Bench, names: Sequence[str], mode: str, rounds: int) -> dict[str, Any]:
    opened: dict[str, tuple[Any, Any]] = {}
    held: dict[str, int] = {}
    for name in names:
        if name.endswith(" (again)"):
            opened[name] = opened[name.removesuffix(" (again)")]
            continue
        before = torch.cuda.memory_allocated()
        opened[name] = bench.runner(name, mode)
        for _ in range(WARM_UP):
            bench.step(opened[name][1])
        torch.cuda.synchronize()
        held[name] = torch.cuda.memory_allocated() - before
    counts = {name: _counts(bench, *opened[name], held[name]) for name in held}
    logits = {name: _logits(bench, opened[name][1]) for name in held}
    first = logits.get("caching", next(iter(logits.values())))
    same = {name: bool(torch.equal(one, first)) for name, one in logits.items()}
    samples = _interleaved({name: _step(bench, runner) for name, (_, runner) in opened.items()}, rounds)
    for name in held:
        close(*opened[name])
    return {"counts": counts, "same_bits": same, "samples": samples, "ratios": ratios(samples)}


def close(ws: Any, runner: Any) -> None:
    """Give everything back at once."""
    runner.close()
    torch.cuda.synchronize()
    ws.synchronize()
    ws.close()


def _step(bench: Bench, runner: Any) -> Callable[[], Any]:
    return lambda: bench.step(runner)


def _logits(bench: Bench, runner: Any) -> torch.Tensor:
    found: torch.Tensor = runner.logits(bench.step(runner).hidden)
    torch.cuda.synchronize()
    return found


def _counts(bench: Bench, ws: Any, runner: Any, held: int) -> dict[str, int]:
    """Of one step: the allocator's calls, fences, and the most bytes allocated, the workspace's own included."""
    torch.cuda.synchronize()
    snapshot, calls = ws.snapshot(), torch.cuda.memory_stats()["allocation.all.allocated"]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outcome = bench.step(runner)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    after = ws.snapshot()
    del outcome
    return {
        "allocator_calls": torch.cuda.memory_stats()["allocation.all.allocated"] - calls,
        "fences": after.fences - snapshot.fences,
        "elided": after.elided - snapshot.elided,
        "held_bytes": held,
        "peak_bytes": held + peak,
        "reserved_bytes": after.reserved,
    }


def _interleaved(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Each round every strategy takes one step, in an order that a seed shuffles."""
    taken: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in FIGURES} for name in steps}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    order, shuffler = list(steps), random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffler.shuffle(order)
            for name in order:
                step = steps[name]
                torch.cuda.synchronize()
                begin.record()
                began = time.perf_counter_ns()
                outcome = step()
                enqueued = time.perf_counter_ns()
                end.record()
                torch.cuda.synchronize()
                over = time.perf_counter_ns()
                del outcome
                row = (over - began) / 1e3, (enqueued - began) / 1e3, begin.elapsed_time(end) * 1e3
                for figure, value in zip(FIGURES, row, strict=True):
                    taken[name][figure].append(round(value, 1))
    finally:
        gc.enable()
    return taken


PAIRS = (
    (AGAIN, BASELINE),
    ("event_fenced (again)", "event_fenced"),
    ("event_fenced", BASELINE),
    ("event_fenced", IDIOM),
    ("event_fenced", "unfenced"),
    ("event_fenced", "upstream"),
    ("event_fenced", "caching"),
    ("per_stream", BASELINE),
    ("unfenced", BASELINE),
    ("upstream", BASELINE),
    ("caching", BASELINE),
)
"""What is compared, over what."""


def ratios(samples: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Median and 95% interval of the paired ratio of each pair, for each figure."""
    found = {}
    for over, under in PAIRS:
        if over in samples and under in samples:
            found[f"{over} / {under}"] = {
                figure: paired(samples[over][figure], samples[under][figure]) for figure in FIGURES
            }
    return found


def profile(bench: Bench, steps: int = 10) -> dict[str, str]:
    """Where the host's time of eager steps goes, function by function; the profiler itself makes calls dearer."""
    found = {}
    for name in (BASELINE, "event_fenced"):
        ws, runner = bench.runner(name)
        for _ in range(WARM_UP):
            bench.step(runner)
        torch.cuda.synchronize()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(steps):
            bench.step(runner)
        profiler.disable()
        torch.cuda.synchronize()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
        found[name] = text.getvalue()
        close(ws, runner)
    return found
