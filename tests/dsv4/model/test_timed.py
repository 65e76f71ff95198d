"""Steps of the sweep on a GPU, made ready here on the CPU: any size, one and two micro-batches, the same every time."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import workspace
from dsv4.model import timed, timed_trace
from dsv4.model.presets import MIXED
from dsv4.model.runner import Runner
from dsv4.model.timed import Timed

MODEL = attrs.evolve(MIXED, num_hidden_layers=3, compress_ratios=(0, 4, 128, 0))


@pytest.mark.parametrize("micro_batches", (1, 2))
@pytest.mark.parametrize("tokens", (2, 5, 130))
def test_a_step_can_be_repeated(tokens: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests hold what it needs, and need no more the second time; the next strategy finds them as they were."""
    monkeypatch.setattr(timed, "CONTEXT", 300)
    monkeypatch.setattr(timed, "SERVED", attrs.evolve(timed.SERVED, activations=torch.float32))
    model = Timed("mixed", 0, "cpu", config=attrs.evolve(MODEL, head_dim=128))
    found = []
    with torch.no_grad():
        for strategy in ("caching", "event_fenced"):
            ws = workspace.create(strategy, device="cpu", micro_batches=micro_batches)
            before = ws.snapshot().fences  # of the device: other workspaces have made some
            steps = model.prepare(ws, "eager", True, micro_batches, tokens)
            rows, contexts = steps._rows, steps._contexts
            assert sum(one.count for one in rows) == tokens
            assert all(one.prefill is (tokens > timed.DECODED) for one in rows)
            assert len({steps._runner.home(one) for one in contexts.values()}) == min(micro_batches, len(contexts))
            for _ in range(2):
                found.append(steps._runner.forward(rows, contexts).hidden.clone())
            steps.run()
            steps.close()
            ws.synchronize()
            assert ws.snapshot().fences == before or micro_batches == 2
    assert torch.isfinite(found[0]).all()
    assert all(torch.equal(one, found[0]) for one in found[1:])


def test_modes_differ_where_a_graph_takes_the_step() -> None:
    """Full graphs are of decode rows, others of up to 512 tokens, those of mode overflow of up to 8."""
    model = Timed("mixed", 0, "cpu", config=attrs.evolve(MODEL, head_dim=128))
    found = {mode: [n for n in (2, 64, 512, 2048) if model.differs(mode, n)] for mode in ("full", "narrow", "overflow")}
    assert found == {"full": [2, 64], "narrow": [2, 64, 512], "overflow": [2]}
    assert all(model.differs("eager", tokens) for tokens in (2, 64, 512, 2048))


@pytest.mark.parametrize("micro_batches", (1, 2))
def test_the_steps_of_a_trace_can_be_repeated(micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two strategies in turn and from the start again, on the same caches, bit for bit."""
    monkeypatch.setattr(timed, "SERVED", attrs.evolve(timed.SERVED, activations=torch.float32))
    monkeypatch.setattr(timed_trace, "SKIPPED", 2)
    monkeypatch.setattr(timed_trace, "STEPS", 6)
    model = Timed("mixed", 0, "cpu", config=attrs.evolve(MODEL, head_dim=128))
    with torch.no_grad():
        loads: list[Any] = []
        found: dict[str, list[torch.Tensor]] = {}
        for strategy in ("caching", "event_fenced"):
            ws = workspace.create(strategy, device="cpu", micro_batches=micro_batches)
            loads.append(model.load(ws, "eager", True, micro_batches))
            keep(loads[-1]._runner, found.setdefault(strategy, []), monkeypatch)
        for place in [*range(8), *range(8)]:
            for one in loads:
                one.run(place)
        for one in loads:
            one.close()
    caching, fenced = found.values()
    assert loads[0].steps == 8 and len(caching) == 16
    assert all(torch.equal(one, other) for one, other in zip(caching, fenced, strict=True))
    assert all(torch.equal(one, again) for one, again in zip(caching[:8], caching[8:], strict=True))


def keep(runner: Runner, found: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a runner's hidden states kept."""
    plain = runner.forward

    def forward(*step: Any) -> Any:
        outcome = plain(*step)
        found.append(outcome.hidden.clone())
        return outcome

    monkeypatch.setattr(runner, "forward", forward)
