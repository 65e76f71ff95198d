"""The whole library on a GPU, once: leases, forks, declared uses, graphs with eager breaks, and a foreign capture.

Each check fills scratch with a value, reads it on a delayed stream while the host goes on, and counts the steps whose
reader saw something else. ``python -m benchmarks.first_run.facade OUT.json COMMIT`` writes them with the cost of a
steady lease.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import workspace

BYTES, CYCLES = 1 << 20, 2_000_000
BLOCK = workspace.Layout("block", data=workspace.spec("N", dtype=torch.uint8))
QUERY = workspace.Layout(
    "indexer_q",
    values=workspace.spec("T", 64, 64, dtype=torch.uint8),
    scales=workspace.spec("T", 64, 4, dtype=torch.uint8),
    weights=workspace.spec("T", 64, dtype=torch.float32),
)
STRATEGIES = ("caching", "event_fenced", "per_stream")


def joined(ws: Any, steps: int = 50) -> int:
    """Steps in which one of two delayed branches read wrong bytes, though the fork joined them."""
    aux0, aux1, wrong = ws.stream("aux0"), ws.stream("aux1"), 0
    for step in range(steps):
        with ws.lease(BLOCK, N=BYTES) as lease:
            lease.data.fill_(step)
            with ws.fork(aux0, aux1) as branch:
                with branch(aux0):
                    torch.cuda._sleep(CYCLES)
                    first = lease.data.clone()
                with branch(aux1):
                    second = lease.data.clone()
        wrong += _overwritten(ws, step, first, second)
    return wrong


def declared(ws: Any, steps: int = 20, *, declare: bool = True) -> int:
    """The same for a use that no join covers; without its declaration this is the control."""
    aux, wrong = ws.stream("aux0"), 0
    for step in range(steps):
        with ws.lease(BLOCK, N=BYTES) as lease:
            lease.data.fill_(step)
            event = ws.event()
            event.record()
            event.wait(aux)
            with ws.on(aux):
                torch.cuda._sleep(CYCLES)
                seen = lease.data.clone()
            if declare:
                ws.use(lease, aux)
        wrong += _overwritten(ws, step, seen)
    return wrong


def _overwritten(ws: Any, value: int, *seen: torch.Tensor) -> int:
    with ws.lease(BLOCK, N=BYTES) as lease:
        lease.data.fill_(255)
    ws.synchronize()
    return int(any(bool((one != value).any()) for one in seen))


def replayed(ws: Any, replays: int = 10) -> int:
    """Replays of a graph with an eager break whose result was wrong, with eager leases in the break and between."""
    result = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    count = torch.zeros(1, dtype=torch.uint8, device="cuda")

    def eager() -> None:
        with ws.lease(BLOCK, N=BYTES) as lease:
            lease.data.fill_(9)
        count.add_(1)

    ws.declare(BLOCK, N=BYTES, lane="main")
    ws.declare(BLOCK, N=BYTES)
    ws.reserve()
    ws.synchronize()
    with ws.capture() as capture:
        with ws.lease(BLOCK, N=BYTES) as lease:
            lease.data.fill_(3)
            lease.data.add_(count)
            capture.eager_break(eager)
            result.copy_(lease.data)
    ws.synchronize()
    count.zero_()
    wrong = 0
    for replay in range(replays):
        capture.graph.replay()
        wrong += _overwritten(ws, 3 + replay, result)
    capture.graph.release()
    return wrong


def foreign(ws: Any) -> int:
    """Wrong buffers after a raw replay of a graph that ``torch.cuda.graph`` captured, beside live eager leases."""
    with ws.lease(BLOCK, N=BYTES):
        pass
    ws.synchronize()
    result = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()), ws.lease(BLOCK, N=BYTES) as lease:
        lease.data.fill_(5)
        result.copy_(lease.data)
    eager = [ws.acquire(BLOCK, N=BYTES) for _ in range(3)]
    for one in eager:
        one.data.fill_(111)
    ws.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    wrong = int((result != 5).any()) + sum(int((one.data != 111).any()) for one in eager)
    for one in eager:
        one.release()
    graph.reset()
    return wrong


def steady(strategy: str, batches: int = 41, calls: int = 1000) -> dict[str, float]:
    """Host us of a steady lease of three tensors and of three ``torch.empty``, interleaved; medians."""
    ws = workspace.create(strategy, device="cuda")

    def lease() -> None:
        with ws.lease(QUERY, T=2) as scratch:
            scratch.values, scratch.scales, scratch.weights  # noqa: B018  (an op's arguments)

    def empty() -> None:
        torch.empty((2, 64, 64), dtype=torch.uint8, device="cuda")
        torch.empty((2, 64, 4), dtype=torch.uint8, device="cuda")
        torch.empty((2, 64), dtype=torch.float32, device="cuda")

    pairs = [(_us(lease, calls), _us(empty, calls)) for _ in range(batches + 3)][3:]
    return {
        "lease_us": statistics.median(one for one, _ in pairs),
        "three_empty_us": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(one / other for one, other in pairs),
    }


def _us(body: Callable[[], None], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        body()
    return (time.perf_counter() - began) / calls * 1e6


def checks(strategy: str) -> dict[str, Any]:
    """Every check under one strategy; all counts but the control's should be 0."""
    ws = workspace.create(strategy, device="cuda")
    with ws.on(ws.stream("main")):
        found: dict[str, Any] = {"joined": joined(ws), "declared": declared(ws), "replayed": replayed(ws)}
        if ws.provider.lends_tensors:
            found["foreign"] = foreign(ws)
        found["undeclared (control)"] = declared(ws, declare=False)
    return found


def main(path: Path, commit: str) -> None:
    """Run everything and write it."""
    with torch.inference_mode():
        found = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit,
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "wrong": {strategy: checks(strategy) for strategy in STRATEGIES},
            "steady": {strategy: steady(strategy) for strategy in STRATEGIES if strategy != "caching"},
        }
    text = json.dumps(found, indent=1)
    path.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
