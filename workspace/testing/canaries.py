"""Canaries: what must stay as it is while a graph replays."""

from __future__ import annotations

from collections.abc import Callable

from workspace.testing.bench import BLOCK, OTHER, Bench, Copy
from workspace.workspace import Workspace


def canaries(bench: Bench, count: int, nbytes: int, first: int = 0) -> list[object]:
    """Tensors of the framework's allocator, filled, that nothing may write."""
    found = []
    for number in range(first, first + count):
        tensor = bench.allocate(nbytes)
        bench.fill(tensor, 200 + number % 50)
        found.append(tensor)
    return found


def intact(bench: Bench, tensors: list[object]) -> None:
    """State that each still holds its value."""
    for number, tensor in enumerate(tensors):
        bench.expect(bench.copy(tensor), 200 + number % 50)


def survives(bench: Bench, ws: Workspace, replay: Callable[[], None], copy: Copy, value: int, nbytes: int) -> None:
    """Eager leases and foreign tensors of the captured size live through a replay, and the replay is right."""
    with ws.lease(BLOCK, N=nbytes) as lease, ws.lease(OTHER, N=nbytes) as other:
        bench.fill(lease.data, 101)
        bench.fill(other.data, 102)
        tensors = canaries(bench, 4, nbytes)
        bench.empty_cache()
        replay()
        bench.expect(copy, value)
        bench.expect(bench.copy(lease.data), 101)
        bench.expect(bench.copy(other.data), 102)
        intact(bench, tensors)
        bench.check()
