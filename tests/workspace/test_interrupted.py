"""Finalisers that run in the middle of an acquire of their own thread change nothing under it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import workspace
from workspace import simulated
from workspace.errors import LeaseError
from workspace.timeline import Timeline

BLOCK = workspace.Layout("block", data=workspace.spec("N", dtype=torch.uint8))


class Cycle:
    """Keeps itself and a suspended generator alive until the collector comes."""

    def __init__(self, suspended: Iterator[None]) -> None:
        self.suspended = suspended
        self.me = self


def suspended(ws: Any, device: simulated.Device, nbytes: int, stream: Any, user: Any) -> Iterator[None]:
    """Holds a lease, with a declared use elsewhere, until it is closed."""
    with ws.on(stream):
        lease = ws.acquire(BLOCK, N=nbytes)
    try:
        device.launch("write", writes=[lease.data], stream=stream.key)
        lease.use(user)
        yield
    finally:
        lease.release()


def run(strategy: str, seed: int) -> tuple[str, int, int]:
    """A program whose generators die whenever the collector comes: verdict, bytes on loan, bytes still reserved."""
    device = simulated.Device(memory="virtual")
    ws = workspace.create(strategy, device=device)
    choose = random.Random(seed)
    streams = [ws.stream(f"s{number}") for number in range(3)]
    thresholds = gc.get_threshold()
    try:
        for _ in range(120):
            size = choose.randrange(1, 40) * 4096
            generator = suspended(ws, device, size, choose.choice(streams), choose.choice(streams))
            next(generator)
            Cycle(generator)
            del generator
            gc.set_threshold(gc.get_count()[0] + choose.randrange(1, 70), 1, 1)
            with ws.on(choose.choice(streams)), ws.lease(BLOCK, N=choose.randrange(1, 40) * 4096) as lease:
                device.launch("write", writes=[lease.data])
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    ws.synchronize()
    allocated = ws.snapshot().allocated
    ws.trim()
    return device.verdict(), allocated, ws.snapshot().reserved


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
@pytest.mark.parametrize("seed", range(6))
def test_generators_collected_in_the_middle_of_an_acquire_lose_no_bytes(strategy: str, seed: int) -> None:
    """The pool is whole, nothing stays on loan, and the run is safe."""
    assert run(strategy, seed) == ("SAFE", 0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_the_deferral_the_pool_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a release that does not wait finds the pool half changed."""
    monkeypatch.setattr(Timeline, "in_progress", lambda self: False)

    def intact(seed: int) -> bool:
        try:
            return run("event_fenced", seed) == ("SAFE", 0, 0)
        except (IndexError, ValueError, AssertionError, AttributeError, KeyError):
            return False

    assert not all(intact(seed) for seed in range(6))


def test_an_acquire_in_the_middle_of_an_acquire_is_refused() -> None:
    """A finaliser that leases would find the pool half changed."""
    ws = workspace.create("event_fenced", device=simulated.Device(memory="virtual"))
    with ws.timeline.lock, pytest.raises(LeaseError, match="in the middle of another acquire"):
        ws.acquire(BLOCK, N=4096)
