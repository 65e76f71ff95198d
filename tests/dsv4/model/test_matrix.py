"""Every safe strategy computes the bits of `caching`, in every run mode, whatever order the edges leave open."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import attrs
import pytest
import torch

import workspace
from dsv4.model import attend
from dsv4.model.decoder import KERNELS
from dsv4.model.forward import Forward
from dsv4.model.graphs import Graphs
from dsv4.model.metadata import Padding
from dsv4.model.presets import TINY
from dsv4.model.route import Forked
from dsv4.scheduler import Rows
from dsv4.topology import Op
from tests.dsv4.model.cells import MODES, SAFE, Setting, reference, runs
from tests.dsv4.model.made import context, decoder, prompt
from workspace import simulated

SETTINGS = list(product(MODES, (True, False), (1, 2)))
CELLS = list(product(SAFE, SETTINGS))
ACROSS_MODES = 1e-5
"""Logits of two modes differ by no more, their standard deviation being about 1: padding and micro-batches change the
shapes of GEMMs, and with them the order of sums."""


@pytest.fixture(autouse=True, scope="module")
def _settled_heap() -> Iterator[None]:
    """Thousands of short-lived nodes make the collector walk what was imported, again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def name_of(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    if isinstance(value[1], tuple):
        return f"{value[0]} {name_of(value[1])}"
    mode, aux, parts = value
    return f"{mode}{'' if aux else ' serial'} x{parts}"


def check(strategy: str, setting: Setting, seeds: Iterable[int], **options: Any) -> None:
    for found in runs(strategy, setting, seeds, **options):
        assert found.verdict == "SAFE", found.race
        assert found.equals(reference(setting, **options))


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_tokens_and_logits_are_bit_equal_to_caching(cell: Any) -> None:
    """In the same mode, under two adversarial schedules; the clock check finds no race."""
    check(*cell, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_more_schedules(cell: Any) -> None:
    """As above; `make proof` runs fifty a cell."""
    check(*cell, range(2, 10))


@pytest.mark.parametrize(("strategy", "mode"), list(zip(SAFE, ("narrow", "full", "wide"), strict=True)))
def test_a_draft_in_a_lane_of_its_own_changes_nothing(strategy: str, mode: str) -> None:
    """The MTP block behind each step, beside graphs of its target, on two micro-batches."""
    setting = mode, True, 2
    check(strategy, setting, range(2), draft=True)
    target, drafted = reference(setting).numbers, reference(setting, draft=True).numbers
    assert all(one.tobytes() == two.tobytes() for one, two in zip(target, [drafted[0], *drafted[1::2]], strict=True))


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=name_of)
def test_modes_agree_within_rounding(setting: Any) -> None:
    """Tokens are the same, logits those of an eager step with aux streams but for the order of sums."""
    eager, other = reference(SETTINGS[0]), reference(setting)
    assert eager.numbers[0].tolist() == other.numbers[0].tolist()
    assert other.distance(eager) <= ACROSS_MODES


def test_the_logits_are_no_constants() -> None:
    """What is compared varies: over tokens, and over the rows of a step."""
    numbers = reference(SETTINGS[0]).numbers
    assert all(one.std(0).mean() > 0.1 and one.std(1).min() > 0.3 for one in numbers[2:])


@pytest.mark.parametrize("strategy", SAFE)
def test_a_dropped_join_is_caught(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a fork whose first branch nobody waits for. The numbers differ, and the check says why."""
    plain = Forward.fork

    def dropped(self: Forward, node: Forked) -> None:
        first, *others = node.branches
        event = self.ws.event()
        event.record()
        with self.ws.on(self.streams[first.stream]):
            event.wait()
            self.run(first.nodes)
        for lease in self.leases.values():
            lease.use(self.streams[first.stream])
        if others:
            plain(self, attrs.evolve(node, branches=tuple(others), streams=node.streams[1:]))
        else:
            self.run(node.body)

    monkeypatch.setattr(Forward, "fork", dropped)
    assert caught(strategy, ("eager", True, 1), range(2))


def caught(strategy: str, setting: Setting, seeds: Iterable[int]) -> bool:
    """Whether the check finds races, and some schedule gives other numbers than `caching`."""
    expected = reference(setting)
    found = runs(strategy, setting, seeds)
    return found[0].verdict == "UNSAFE" and not all(one.equals(expected) for one in found)


def test_an_unfenced_pool_is_caught_with_two_micro_batches() -> None:
    """Control: views by size for everybody. The model's own joins order it while one micro-batch runs alone."""
    check("unfenced", ("eager", True, 1), range(2))
    assert caught("unfenced", ("eager", True, 2), range(4))
    assert caught("unfenced", ("narrow", True, 2), range(4))


def test_a_late_refill_of_a_graphs_metadata_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: metadata copied on a stream that nothing orders before the replay."""
    plain = Graphs.replay

    def late(self: Graphs, *step: Any) -> Any:
        ws, fill = self._decoder.ws, self._buffer.fill

        def elsewhere(host: Any) -> Any:
            with ws.on(ws.stream("elsewhere")):
                return fill(host)

        with monkeypatch.context() as patch:
            patch.setattr(self._buffer, "fill", elsewhere)
            return plain(self, *step)

    monkeypatch.setattr(Graphs, "replay", late)
    assert caught("event_fenced", ("narrow", True, 1), range(4))


@pytest.mark.parametrize("cleared", (True, False))
def test_rows_that_nobody_attends_for_are_zero(cleared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What padding holds reaches the experts and decides how large their batches are. Control: it is not cleared."""
    seen: list[bool] = []
    plain = KERNELS["fused_inv_rope_fp8_quant"]

    def watched(f: Forward, op: Op) -> None:
        if f.meta.attended < f.tokens:
            seen.append(bool((f.output.o[f.meta.attended :] == 0).all()))
        plain(f, op)

    monkeypatch.setitem(KERNELS, "fused_inv_rope_fp8_quant", watched)
    if not cleared:
        monkeypatch.setattr(attend, "clear_padding", lambda f: None)
    device = simulated.Device(memory="host", execution="deferred", seed=0)
    with torch.no_grad(), device:
        model = decoder(TINY, ws=workspace.create("event_fenced", device=device, poison=True), capacity=64)
        one = context(model, prompt(TINY, 9))
        with model.ws.fork(model.main) as branch, branch(model.main):
            model.forward([Rows(0, 0, 8, True, True)], {0: one}, Padding(16, 1, 0))
            model.forward([Rows(0, 8, 1, False, True)], {0: one}, Padding(2, 1, 0))
    assert len(seen) == 2 * TINY.num_hidden_layers and all(seen) == cleared
