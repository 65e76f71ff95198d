"""A missing edge is found by the judge and shows as other bytes under some schedule; a fenced program never does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.simulated.block import EDGES, Program
from workspace import simulated
from workspace.simulated.witness import compare, observe, schedules

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fenced_model_computes_the_same_bits_under_every_schedule(dtype: torch.dtype) -> None:
    program = Program(dtype)
    expected = program.eager()
    for _, schedule in schedules((0, 1, 2), range(12)):
        results: list[torch.Tensor] = []
        device, _ = observe(lambda d, to=results: to.append(program(d)), schedule)
        assert torch.equal(results[0], expected)
        assert device.verdict() == "SAFE"
    assert compare(program, seeds=range(4)) is None


@pytest.mark.parametrize("dropped", EDGES)
def test_the_judge_finds_exactly_the_true_races_of_each_dropped_edge(dropped: str) -> None:
    """True races by brute force: every pair of conflicting nodes, every path."""
    device = simulated.Device(memory="host", execution="deferred")
    oracle = Oracle(device)
    with device:
        Program(dropped=dropped)(device)
    assert racing_pairs(device) == oracle.racing_pairs()
    assert (device.verdict() == "UNSAFE") == bool(oracle.racing_pairs())


# Dropping these leaves every conflicting pair ordered by another edge.
REDUNDANT: frozenset[str] = frozenset()
# True races that no tried schedule shows: the late reader finds the bytes it would have read in time.
UNWITNESSED: frozenset[str] = frozenset()


@pytest.mark.parametrize("dropped", EDGES)
def test_a_dropped_edge_corrupts_under_some_schedule(dropped: str) -> None:
    program = Program(dropped=dropped)
    device, _ = observe(program, simulated.InOrder())
    assert (device.verdict() == "SAFE") == (dropped in REDUNDANT)
    assert (compare(program, seeds=range(8)) is None) == (dropped in REDUNDANT | UNWITNESSED)


def test_corruption_is_replayed_by_its_seed() -> None:
    program = Program(dropped="join values")
    seed = next(seed for seed in range(50) if corrupted(program, seed))
    _, first = observe(program, simulated.Random(seed))
    _, again = observe(program, simulated.Random(seed))
    assert first.prints == again.prints


def corrupted(program: Program, seed: int) -> bool:
    _, serial = observe(program, simulated.InOrder())
    _, other = observe(program, simulated.Random(seed))
    return serial.prints != other.prints


def test_a_directed_schedule_shows_a_reported_race() -> None:
    """Reader before writer, for the pair the judge reported."""
    program = Program(dropped="join values")
    device, serial = observe(program, simulated.InOrder())
    race = next(race for race in device.races() if race.first.write and not race.second.write)

    def reader(node: simulated.Node) -> bool:
        return (node.stream, node.position) == (race.second.stream, race.second.position)

    def writer(node: simulated.Node) -> bool:
        return (node.stream, node.position) == (race.first.stream, race.first.position)

    _, other = observe(program, simulated.Directed(reader, writer))
    assert serial.prints != other.prints


def test_columns_of_one_slab_are_apart_and_shared_ones_are_not() -> None:
    for overlap in (0, 1):
        device = simulated.Device(memory="host", execution="deferred")
        side = device.new_stream("side")
        with device:
            slab = torch.zeros(16, 8)
            device.synchronize()
            slab[:, :4].add_(1)
            with device.on(side):
                slab[:, 4 - overlap :].mul_(2)
        assert device.verdict() == ("UNSAFE" if overlap else "SAFE")


class Oracle:
    """Records what a program enqueues, and finds unordered conflicting pairs by search."""

    def __init__(self, device: simulated.Device) -> None:
        self._nodes: list[tuple[int, str, list[Any], list[Any]]] = []
        self._before: list[set[int]] = []
        self._last: dict[int, int] = {}
        self._waits: dict[int, list[int]] = {}
        self._records: dict[int, int | None] = {}
        launch, record, wait = device.launch, device.record, device.wait

        def on_launch(label: str, reads: Any = (), writes: Any = (), fn: Any = None, stream: int | None = None) -> Any:
            key = device.current_stream() if stream is None else stream
            self._add(key, label, list(reads), list(writes))
            return launch(label, reads, writes, fn, stream)

        def on_record(event: int, stream: int | None = None) -> None:
            self._records[event] = self._last.get(device.current_stream() if stream is None else stream)
            record(event, stream)

        def on_wait(event: int, stream: int | None = None) -> None:
            last = self._records.get(event)
            if last is not None:
                self._waits.setdefault(device.current_stream() if stream is None else stream, []).append(last)
            wait(event, stream)

        device.launch, device.record, device.wait = on_launch, on_record, on_wait  # type: ignore[method-assign]

    def _add(self, stream: int, label: str, reads: list[Any], writes: list[Any]) -> None:
        before: set[int] = set()
        for prior in [*self._waits.pop(stream, []), *([self._last[stream]] if stream in self._last else [])]:
            before |= {prior} | self._before[prior]
        self._last[stream] = len(self._nodes)
        self._nodes.append((stream, label, reads, writes))
        self._before.append(before)

    def racing_pairs(self) -> set[tuple[int, str, int, str]]:
        found = set()
        for j, (stream, label, reads, writes) in enumerate(self._nodes):
            for i in range(j):
                other, name, its_reads, its_writes = self._nodes[i]
                clash = meet(its_writes, writes) or meet(its_writes, reads) or meet(its_reads, writes)
                if clash and i not in self._before[j]:
                    found.add((other, name, stream, label))
        return found


def meet(left: Iterable[Any], right: Iterable[Any]) -> bool:
    return any(a < b + m and b < a + n for a, n in left for b, m in right)


def racing_pairs(device: simulated.Device) -> set[tuple[int, str, int, str]]:
    return {(race.first.stream, race.first.label, race.second.stream, race.second.label) for race in device.races()}
