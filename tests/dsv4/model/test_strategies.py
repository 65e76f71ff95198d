"""Where scratch comes from changes no bit of the logits; the forks are what keeps them right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workspace
from dsv4.cache.caches import Caches
from dsv4.model.decoder import Decoder
from dsv4.model.forward import Forward
from dsv4.model.presets import MIXED
from dsv4.scheduler import Rows
from dsv4.topology import Fork
from tests.dsv4.model.made import blocks_for, context, decoder, full_prefill, prompt, step
from workspace import simulated

SAFE = ("caching", "event_fenced", "per_stream")
LENGTHS = 135, 70


def served(ws: Any, aux_streams: bool = True) -> torch.Tensor:
    """Logits of a prompt in two chunks, the second beside another prompt, then decode rows of both."""
    model = decoder(MIXED, ws=ws, aux_streams=aux_streams, capacity=512)
    contexts = {i: context(model, prompt(MIXED, length + 2, i)) for i, length in enumerate(LENGTHS)}
    first, second = LENGTHS
    kept = ws.snapshot().allocated
    found = [step(model, contexts, (0, 0, 100, True))[1]]
    found.append(step(model, contexts, (0, 100, first - 100, True), (1, 0, second, True))[1])
    for turn in range(2):
        found.append(step(model, contexts, (0, first + turn, 1, False), (1, second + turn, 1, False))[1])
    assert ws.snapshot().allocated == kept
    return torch.cat(found)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return served(workspace.create("caching", device="cpu"))


@pytest.mark.parametrize("aux_streams", (True, False))
@pytest.mark.parametrize("strategy", SAFE)
def test_logits_are_bit_equal_under_every_safe_strategy(
    strategy: str, aux_streams: bool, expected: torch.Tensor
) -> None:
    """On device="cpu", with and without aux streams; no lease is left behind."""
    assert torch.equal(served(workspace.create(strategy, device="cpu"), aux_streams), expected)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("strategy", SAFE)
def test_logits_are_bit_equal_on_virtual_streams(strategy: str, seed: int, expected: torch.Tensor) -> None:
    """Every operator waits on its stream and runs under a seeded schedule; the clock check finds no race."""
    device = simulated.Device(memory="host", execution="deferred", seed=seed)
    with device:
        found = served(workspace.create(strategy, device=device))
        assert torch.equal(found, expected)
    assert device.verdict() == "SAFE", device.races()[:1]


def test_without_forks_the_logits_are_corrupt_and_the_check_says_so(
    monkeypatch: pytest.MonkeyPatch, expected: torch.Tensor
) -> None:
    """Control: branches that nothing orders against the main stream."""

    def unordered(self: Forward, node: Fork) -> None:
        for one in node.branches:
            with self.ws.on(self.streams[one.stream]):
                self.run(one.nodes)
        self.run(node.body)

    monkeypatch.setattr(Forward, "_fork", unordered)
    device = simulated.Device(memory="host", execution="deferred", seed=0)
    with device:
        found = served(workspace.create("event_fenced", device=device))
        assert not torch.equal(found, expected)
    assert device.verdict() == "UNSAFE"


def test_a_strategy_shares_bytes_between_stages() -> None:
    """Scratch in a pool is less than the sum of what the stages lease: equal bits are not for want of reuse."""
    ws = workspace.create("event_fenced", device="cpu", statistics=True)
    served(ws)
    owners = ws.snapshot().owners
    assert {"preparation", "attention", "attention_output", "experts"} <= owners.keys()
    assert ws.snapshot().peak_allocated < sum(one.peak for one in owners.values())


def in_turns(ws: Any) -> list[torch.Tensor]:
    """Two micro-batches, each a request on streams and caches of its own, layer by layer in turn.

    Ops declare a cache as a whole, so caches in common would need edges even where no slot is.
    """
    first = decoder(MIXED, ws=ws, capacity=512)
    caches = Caches(MIXED, first.precision.storage, blocks_for(MIXED, 512))
    second = Decoder(ws, first.shard, first.precision, first.engine, first.weights, caches, suffix=".1")
    contexts = {i: context(first, prompt(MIXED, length, i)) for i, length in enumerate(LENGTHS)}
    ws.synchronize()
    pairs = []
    for index, model in enumerate((first, second)):
        with ws.on(model.main):
            rows = [Rows(index, 0, LENGTHS[index], True, True)]
            pairs.append((index, model, model.prepared(rows, contexts)))
    walks = [(index, model, walk, model.layers(walk)) for index, model, walk in pairs]
    while walks:
        for one in list(walks):
            index, model, _, layers = one
            with ws.slot(micro_batch=index), ws.on(model.main):
                if next(layers, layers) is layers:
                    walks.remove(one)
    found = []
    for _, model, walk in pairs:
        with ws.on(model.main):
            found.append(model.logits(walk.hidden))
    ws.synchronize()
    return found


@pytest.mark.parametrize("strategy", SAFE)
def test_micro_batches_that_take_turns_compute_what_each_does_alone(strategy: str) -> None:
    """Bit for bit, the streams of both interleaved by a seeded schedule."""
    ws = workspace.create("caching", device="cpu")
    model = decoder(MIXED, ws=ws, capacity=512)
    alone = [full_prefill(model, prompt(MIXED, length, i)) for i, length in enumerate(LENGTHS)]
    device = simulated.Device(memory="host", execution="deferred", seed=3)
    with device:
        found = in_turns(workspace.create(strategy, device=device, micro_batches=2))
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    assert device.verdict() == "SAFE", device.races()[:1]
