"""Every safe strategy computes the bits of `caching`, in every run mode, whatever order the edges leave open."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import product
from typing import Any

import attrs
import pytest

from dsv4.model.forward import Forward
from dsv4.model.graphs import Graphs
from dsv4.topology import Fork
from tests.dsv4.model.cells import MODES, SAFE, reference, run

SETTINGS = list(product(MODES, (True, False), (1, 2)))
CELLS = list(product(SAFE, SETTINGS))
SEEDED = [(cell, seed) for cell in CELLS for seed in range(2) if (cell[0], seed) != ("caching", 0)]
"""Two schedules a cell. That of `caching` in program order is what the others are compared with."""
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


def check(strategy: str, setting: tuple[str, bool, int], seed: int, **options: Any) -> None:
    found = run(strategy, *setting, seed, **options)
    assert found.verdict == "SAFE", found.race
    assert found.equals(reference(*setting, **options))


@pytest.mark.parametrize(("cell", "seed"), SEEDED, ids=name_of)
def test_tokens_and_logits_are_bit_equal_to_caching(cell: Any, seed: int) -> None:
    """In the same mode, under adversarial schedules; the clock check finds no race."""
    check(*cell, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_more_schedules(cell: Any, seed: int) -> None:
    """As above; `make proof` runs fifty a cell."""
    check(*cell, seed)


@pytest.mark.parametrize(("strategy", "mode"), list(zip(SAFE, ("narrow", "full", "wide"), strict=True)))
def test_a_draft_in_a_lane_of_its_own_changes_nothing(strategy: str, mode: str) -> None:
    """The MTP block behind each step, beside graphs of its target, on two micro-batches."""
    check(strategy, (mode, True, 2), 1, draft=True)
    target, drafted = reference(mode, True, 2).numbers, reference(mode, True, 2, draft=True).numbers
    assert all(one.tobytes() == two.tobytes() for one, two in zip(target, [drafted[0], *drafted[1::2]], strict=True))


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=name_of)
def test_modes_agree_within_rounding(setting: Any) -> None:
    """Tokens are the same, logits those of an eager step with aux streams but for the order of sums."""
    eager, other = reference(*SETTINGS[0]), reference(*setting)
    assert eager.numbers[0].tolist() == other.numbers[0].tolist()
    assert other.distance(eager) <= ACROSS_MODES


def test_the_logits_are_no_constants() -> None:
    """What is compared varies: over tokens, and over the rows of a step."""
    numbers = reference(*SETTINGS[0]).numbers
    assert all(one.std(0).mean() > 0.1 and one.std(1).min() > 0.3 for one in numbers[2:])


@pytest.mark.parametrize("strategy", SAFE)
def test_a_dropped_join_is_caught(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a fork whose first branch nobody waits for. The numbers differ, and the check says why."""
    plain = Forward._fork

    def dropped(self: Forward, node: Fork) -> None:
        first, *others = node.branches
        event = self.ws.event()
        event.record()
        with self.ws.on(self.streams[first.stream]):
            event.wait()
            self.run(first.nodes)
        for lease in self.leases.values():
            lease.use(self.streams[first.stream])
        if others:
            plain(self, attrs.evolve(node, branches=tuple(others)))
        else:
            self.run(node.body)

    monkeypatch.setattr(Forward, "_fork", dropped)
    verdicts, equal = zip(*(caught(strategy, ("eager", True, 1), seed) for seed in range(2)), strict=True)
    assert set(verdicts) == {"UNSAFE"} and not all(equal)


def caught(strategy: str, setting: tuple[str, bool, int], seed: int) -> tuple[str, bool]:
    """The verdict, and whether the numbers are those of `caching`."""
    expected = reference(*setting)
    found = run(strategy, *setting, seed)
    return found.verdict, found.equals(expected)


def test_an_unfenced_pool_is_caught_with_two_micro_batches() -> None:
    """Control: views by size for everybody. The model's own joins order it while one micro-batch runs alone."""
    assert caught("unfenced", ("eager", True, 1), 0) == ("SAFE", True)
    found = [caught("unfenced", (mode, True, 2), seed) for mode in ("eager", "narrow") for seed in range(2)]
    assert {verdict for verdict, _ in found} == {"UNSAFE"} and not all(equal for _, equal in found)


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
    verdicts, equal = zip(*(caught("event_fenced", ("narrow", True, 1), seed) for seed in range(4)), strict=True)
    assert set(verdicts) == {"UNSAFE"} and not all(equal)
