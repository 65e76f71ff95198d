"""Steady state: what a cached lease costs the host, against allocating its tensors.

One stream, the three tensors of an FP4 indexer query at T = 2, through the public ``with``, on the CPU: the
simulated device with real memory and without a log, and ``torch.empty`` of the same shapes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import workspace
from benchmarks.figure import Figure, interleaved_us, median_of, median_ratio
from workspace import simulated

POOLED = ("event_fenced", "per_stream")
BATCHES, CALLS, WARM_UP = 41, 2000, 100
TOKENS = 2
LARGEST = 455
"""Tokens whose tensors fill a slab of 2 MiB but for 512 bytes."""
SHAPES = {
    "values": ((64, 64), torch.uint8),
    "scales": ((64, 4), torch.uint8),
    "weights": ((64,), torch.float32),
}
SPECS: Any = {name: workspace.spec("T", *shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
INDEXER_Q = workspace.Layout("indexer_q", **SPECS)
FILLER = workspace.Layout("filler", filler=workspace.spec("N", dtype=torch.uint8))


def figures() -> list[Figure]:
    """All figures of this benchmark."""
    found = []
    with torch.inference_mode():
        for strategy in POOLED:
            found += [*_against_empty(strategy), *_sizes(strategy), _streams(strategy), _free_blocks(strategy)]
    return found


def _open(strategy: str) -> Any:
    device = simulated.Device(memory="host", log=False)
    ws = workspace.create(strategy, device=device)
    _leases(ws, WARM_UP)()
    return ws


def _leases(ws: Any, calls: int = CALLS) -> Callable[[], None]:
    def body() -> None:
        layout, tokens = INDEXER_Q, TOKENS
        for _ in range(calls):
            with ws.lease(layout, T=tokens) as scratch:
                scratch.values, scratch.scales, scratch.weights  # noqa: B018  (an op's arguments)

    return body


def _empties() -> None:
    shapes = [((TOKENS, *shape), dtype) for shape, dtype in SHAPES.values()]
    (values, u8), (scales, _), (weights, f32) = shapes
    for _ in range(CALLS):
        torch.empty(values, dtype=u8), torch.empty(scales, dtype=u8), torch.empty(weights, dtype=f32)


def _against_empty(strategy: str) -> list[Figure]:
    ws = _open(strategy)
    before = sum(ws.device.counters.values())
    times = interleaved_us([_leases(ws), _empties], BATCHES, CALLS)
    calls = sum(ws.device.counters.values()) - before
    return [
        Figure(f"{strategy}: lease / three torch.empty", median_ratio(times, 0, 1), "ratio", 1 / 3),
        Figure(f"{strategy}: lease", median_of(times, 0), "us"),
        Figure(f"{strategy}: three torch.empty", median_of(times, 1), "us"),
        Figure(f"{strategy}: driver calls in {(BATCHES + 1) * CALLS} leases", calls, "calls", 0),
    ]


def _sizes(strategy: str) -> list[Figure]:
    """Two small sizes in turn where a large one is declared: a pool of just that lends both the same block."""
    locked = {headroom: _locked(strategy, headroom) for headroom in (1.0, 2.0)}
    times = interleaved_us([*(_alternating(ws) for ws in locked.values()), _empties], BATCHES, CALLS)
    what = f"{strategy}: a lease of two sizes in turn"
    return [
        Figure(f"{what}, headroom {headroom:.0f} / three torch.empty", median_ratio(times, place, 2), "ratio")
        for place, headroom in enumerate(locked)
    ]


def _locked(strategy: str, headroom: float) -> Any:
    ws = workspace.create(strategy, device=simulated.Device(memory="host", log=False), headroom=headroom)
    ws.declare(INDEXER_Q, T=LARGEST)
    ws.reserve()
    ws.lock()
    _alternating(ws, WARM_UP)()
    return ws


def _alternating(ws: Any, calls: int = CALLS) -> Callable[[], None]:
    def body() -> None:
        layout = INDEXER_Q
        for call in range(calls):
            with ws.lease(layout, T=64 + (call & 1)) as scratch:
                scratch.values, scratch.scales, scratch.weights  # noqa: B018  (an op's arguments)

    return body


def _streams(strategy: str) -> Figure:
    """The same lease on the last of 64 streams that all took leases, against a workspace with one stream."""
    one, many = _open(strategy), _open(strategy)
    streams = [many.stream(f"stream{index}") for index in range(64)]
    for stream in streams:
        with many.on(stream):
            _leases(many, WARM_UP)()
    with many.on(streams[-1]):
        times = interleaved_us([_leases(many), _leases(one)], BATCHES, CALLS)
    return Figure(f"{strategy}: 64 streams / 1 stream", median_ratio(times, 0, 1), "ratio", 1.5)


def _free_blocks(strategy: str) -> Figure:
    few, many = (_with_free_blocks(strategy, count) for count in (10, 10_000))
    times = interleaved_us([_leases(many), _leases(few)], BATCHES, CALLS)
    return Figure(f"{strategy}: 10,000 free blocks / 10", median_ratio(times, 0, 1), "ratio", 1.5)


def _with_free_blocks(strategy: str, count: int) -> Any:
    """A workspace with `count` free blocks of many sizes, kept apart by live ones."""
    ws = _open(strategy)
    leases = [ws.acquire(FILLER, N=256 * (1 + index % 997)) for index in range(2 * count)]
    for lease in leases[::2]:
        lease.release()
    _leases(ws, WARM_UP)()
    return ws
