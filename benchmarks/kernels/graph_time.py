"""Device time of a call inside a CUDA graph: 20 nodes, rotating over at least 4 sets of buffers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

NODES = 20
SETS = 4
SPAN_MS = 4.0
"""How long the replays of one measurement run together."""


def graph_us(calls: Sequence[Callable[[], object]], rounds: int = 7) -> float:
    """Microseconds of one call: the median over some rounds of replays of a graph of `NODES` calls in turn."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for node in range(NODES):
            calls[node % len(calls)]()
    replays = 1
    while (once := _replayed_ms(graph, replays)) < SPAN_MS and replays < 1024:
        replays *= 2 if once > SPAN_MS / 4 else 4
    times = [_replayed_ms(graph, replays) for _ in range(rounds)]
    return statistics.median(times) / replays / NODES * 1000


def _replayed_ms(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_us(nbytes: int) -> float:
    """Of a device-to-device copy that reads and writes so many bytes together: ``copy_`` or an elementwise kernel.

    The faster of the two: ``copy_`` becomes a memcpy node, which is slow at some sizes.
    """
    values = max(2048, nbytes // 2 // 4 // 1024 * 1024)
    pairs = [
        [torch.randint(1 << 30, (values,), dtype=torch.int32, device="cuda") for _ in range(2)] for _ in range(SETS)
    ]
    copies = [partial(to.copy_, source) for to, source in pairs]
    kernels = [partial(torch.bitwise_not, source, out=to) for to, source in pairs]
    return min(graph_us(copies), graph_us(kernels)) * (nbytes / (8 * values) if nbytes > 8 * values else 1)


def nothing_us() -> float:
    """Of a node whose kernel does nothing but read the clock twice."""
    return graph_us([lambda: torch.cuda._sleep(0)])
