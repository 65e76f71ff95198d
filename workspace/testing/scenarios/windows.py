"""b: reuse inside a window of work in flight: layers and steps."""

from __future__ import annotations

import torch

from workspace.layout import Layout, spec
from workspace.testing.bench import Bench
from workspace.testing.scenario import scenario

LAYER = Layout("layer", out=spec("N", dtype=torch.uint8), idx=spec("K", dtype=torch.uint8))


def _sizes(bench: Bench) -> tuple[tuple[int, int], ...]:
    return (bench.mib(4), bench.mib(1)), (bench.mib(3), bench.mib(0.5))


@scenario("b1", "P", "fence", "declare")
def layers_with_readers_behind(bench: Bench) -> None:
    """Eight layers hand an index to three streams that read it late; nothing is joined and the host never waits."""
    ws, sides = bench.ws, bench.streams(3)
    for step in range(bench.times(200)):
        out, idx = _sizes(bench)[step % 2]
        for layer in range(8):
            value = (8 * step + layer) % 250 + 1
            with ws.lease(LAYER, N=out, K=idx) as lease:
                bench.fill(lease.idx, value)
                bench.fill(lease.out, 255 - value)
                for side in sides[: 1 + layer % 3]:
                    bench.order(bench.main, side)
                    bench.slow(side)
                    bench.expect(bench.copy(lease.idx, side), value)
                    ws.use(lease, side)
                bench.expect(bench.copy(lease.out), 255 - value)


@scenario("b1-fork", "P", "join")
def layers_with_forks(bench: Bench) -> None:
    """The same with forks: each layer's readers are joined before its lease is released."""
    ws, sides = bench.ws, bench.streams(3)
    for step in range(bench.times(100)):
        out, idx = _sizes(bench)[step % 2]
        for layer in range(8):
            value = (8 * step + layer) % 250 + 1
            with ws.lease(LAYER, N=out, K=idx) as lease:
                bench.fill(lease.idx, value)
                with ws.fork(*sides) as branch:
                    for side in sides:
                        with branch(side):
                            bench.slow()
                            bench.expect(bench.copy(lease.idx), value)


@scenario("b1-micro-batches", "P", "fence", "declare")
def interleaved_micro_batches(bench: Bench) -> None:
    """Two micro-batches interleave on one host thread and two main streams, with one shared side stream."""
    ws = bench.workspace(micro_batches=2)
    first, second, side = bench.streams(3)
    for step in range(bench.times(50)):
        held = []
        for number, stream in enumerate((first, second)):
            value = (2 * step + number) % 250 + 1
            with ws.slot(micro_batch=number), ws.on(stream):
                lease = ws.acquire(LAYER, N=bench.mib(2), K=bench.mib(1))
                bench.fill(lease.out, value)
                bench.fill(lease.idx, value)
                with ws.fork(side) as branch, branch(side):
                    bench.slow()
                    bench.expect(bench.copy(lease.idx), value)
                bench.order(stream, side)
                bench.slow(side)
                bench.expect(bench.copy(lease.out, side), value)
                ws.use(lease, side)
                held.append((number, stream, lease))
        for number, stream, lease in reversed(held):
            with ws.slot(micro_batch=number), ws.on(stream):
                lease.release()
