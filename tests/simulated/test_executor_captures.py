"""Operators enqueued during a capture become its nodes, and what CUDA refuses there is refused here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.simulated.block import TOKENS, WIDTH, Program
from workspace import simulated
from workspace.errors import CaptureBroken
from workspace.simulated.witness import compare


@pytest.fixture
def device() -> simulated.Device:
    device = simulated.Device(memory="host", execution="deferred", seed=1)
    device.new_stream("side")
    device.new_stream("aux")
    device.new_stream("captured")
    return device


def capture(device: simulated.Device, fn: Callable[[], torch.Tensor]) -> tuple[simulated.SimulatedGraph, torch.Tensor]:
    with device.on(3):
        device.begin_capture(3)
        result = fn()
        return device.end_capture(3), result


def test_a_replay_computes_anew_in_the_same_addresses(device: simulated.Device) -> None:
    with device:
        x = torch.zeros(4)
        device.synchronize()
        graph, y = capture(device, lambda: torch.relu(x * 2 - 1))
        executed = device.queue.executed
        spans = device.executor.aliases.of(y).spans
        for value in (1.0, 2.0, -3.0):
            x.fill_(value)
            device.synchronize()
            graph.launch(3)
            with device.on(3):
                assert y.tolist() == [max(0.0, value * 2 - 1)] * 4
        assert device.executor.aliases.of(y).spans == spans
    assert executed == 2 and device.verdict() == "SAFE"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_model_computes_the_same_bits(dtype: torch.dtype) -> None:
    """With its forks and joins inside the graph, replayed under random schedules."""
    program = Program(dtype)
    expected = program.eager()
    for seed in range(4):
        device = simulated.Device(memory="host", execution="deferred", seed=seed)
        for name in ("side", "aux", "captured"):
            device.new_stream(name)
        with device:
            graph, y = capture(device, lambda d=device: program(d, main=3))
            for _ in range(2):
                graph.launch(3)
            device.synchronize()
        assert torch.equal(y, expected) and device.verdict() == "SAFE"


@pytest.mark.parametrize("dropped", ["", "join keys"])
def test_a_race_inside_a_graph_is_found_and_corrupts(dropped: str) -> None:
    def program(device: simulated.Device) -> None:
        for name in ("side", "aux", "captured"):
            device.new_stream(name)
        graph, _ = capture(device, lambda: Program(dropped=dropped)(device, main=3))
        graph.launch(3)
        device.synchronize()
        verdicts.append(device.verdict())

    verdicts: list[str] = []
    divergence = compare(program, seeds=range(8))
    assert (divergence is not None) == bool(dropped)
    assert set(verdicts) == {"UNSAFE" if dropped else "SAFE"}


def test_a_replay_that_overlaps_a_late_reader_is_found(device: simulated.Device) -> None:
    """Nothing orders the side stream's read of the graph's output before the next replay writes it."""
    with device:
        x = torch.ones(4)
        device.synchronize()
        graph, y = capture(device, lambda: x + 1)
        graph.launch(3)
        event = device.new_event()
        device.record(event, 3)
        device.wait(event, 1)
        with device.on(1):
            y.sum()
        assert device.verdict() == "SAFE"
        graph.launch(3)
    assert device.verdict() == "UNSAFE"


BREAKING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "mask assignment": lambda t: t.__setitem__(t > 0, torch.zeros(())),
    "truth": lambda t: bool(t.any()),
    "unique": lambda t: t.unique(),
    "repr": lambda t: repr(t),
    "host tensor": lambda t: t + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "sampler": lambda t: torch.multinomial(t, 2),
}


@pytest.mark.parametrize("call", BREAKING)
def test_a_call_that_waits_breaks_the_capture(device: simulated.Device, call: str) -> None:
    with device:
        x = torch.ones(4)
        device.synchronize()
        with device.on(3):
            device.begin_capture(3)
            y = x + 1
            with pytest.raises(CaptureBroken):
                BREAKING[call](y)
            with pytest.raises(CaptureBroken):
                device.end_capture(3)
        assert (x + 1).tolist() == [2, 2, 2, 2]


NOT_BREAKING: dict[str, Callable[[torch.Tensor], object]] = {
    "integer index": lambda t: t[torch.zeros(2, dtype=torch.int64)],
    "where": lambda t: torch.where(t > 0, t, 0),
    "single value": lambda t: t.__setitem__(0, 5.0),
    "factory": lambda t: torch.zeros(3) + torch.arange(3),
    "wrong shape": lambda t: pytest.raises(RuntimeError, t.add, torch.zeros(3)),
    "random": lambda t: torch.rand(3),
}


@pytest.mark.parametrize("call", NOT_BREAKING)
def test_a_call_that_does_not_wait_leaves_the_capture_valid(device: simulated.Device, call: str) -> None:
    """Negative control of the refusals."""
    with device:
        x = torch.ones(4)
        device.synchronize()
        with device.on(3):
            device.begin_capture(3)
            NOT_BREAKING[call](x + 1)
            device.end_capture(3).launch(3)
        device.synchronize()


def test_random_numbers_differ_between_replays_and_follow_the_seed(device: simulated.Device) -> None:
    """On CUDA a replay continues from the generator's present state."""
    with device:
        before = torch.get_rng_state()
        graph, y = capture(device, lambda: torch.rand(4))
        assert torch.equal(torch.get_rng_state(), before)
        rows = []
        for _ in range(2):
            torch.manual_seed(7)
            for _ in range(2):
                graph.launch(3)
                with device.on(3):
                    rows.append(y.tolist())
    torch.manual_seed(7)
    assert rows[0] == torch.rand(4).tolist()
    assert rows[0] != rows[1] and rows[0] == rows[2] and rows[1] == rows[3]


def test_memory_freed_in_a_capture_is_used_again_in_it(device: simulated.Device) -> None:
    with device:
        device.begin_capture(3)
        with device.on(3):
            a = torch.zeros(TOKENS, WIDTH)
            spans = device.executor.aliases.of(a).spans
            del a
            b = torch.zeros(TOKENS, WIDTH)
            assert device.executor.aliases.of(b).spans == spans
        device.end_capture(3)
        c = torch.zeros(TOKENS, WIDTH)
        assert device.executor.aliases.of(c).spans != spans
