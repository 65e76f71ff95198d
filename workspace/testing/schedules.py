"""Adversarial schedules: legal orders that bring a missing edge to light."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workspace.simulated import InOrder, Node, Random, Schedule, StreamFirst

SLOW = "slow"
"""Label of a delay: a stream's work behind it waits until nothing else can run."""


class Delays:
    """Runs delays last, and leaves every other choice to another schedule. Nothing runs before somebody waits."""

    def __init__(self, inner: Schedule) -> None:
        self._inner = inner

    def choose(self, heads: Sequence[Node]) -> int:
        ready = [index for index, head in enumerate(heads) if head.label != SLOW]
        if not ready:
            return self._inner.choose(heads)
        return ready[self._inner.choose([heads[index] for index in ready])]

    def burst(self, pending: int) -> int:
        return 0


def adversarial(streams: int, seeds: int) -> list[tuple[str, Callable[[], Schedule]]]:
    """Schedules by name: host order, each of the first `streams` streams first and last, and `seeds` random ones.

    Random ones run in bursts between enqueues, so that a device which keeps up with the host is among them.
    """
    found: list[tuple[str, Callable[[], Schedule]]] = [("in order", lambda: Delays(InOrder()))]
    for key in range(1, streams + 1):
        found.append((f"stream {key} first", lambda key=key: Delays(StreamFirst(key))))  # type: ignore[misc]
        found.append((f"stream {key} last", lambda key=key: Delays(StreamFirst(key, last=True))))  # type: ignore[misc]
    for seed in range(seeds):
        found.append((f"delays, seed {seed}", lambda seed=seed: Delays(Random(seed))))  # type: ignore[misc]
        found.append((f"seed {seed}", lambda seed=seed: Random(seed, eagerness=0.3)))  # type: ignore[misc]
    return found
