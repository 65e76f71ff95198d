"""Where a runner puts requests, what it refuses, and what an error leaves behind."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import workspace
from dsv4.cache.caches import Caches
from dsv4.cache.errors import CacheFull
from dsv4.errors import RunError
from dsv4.model import finish
from dsv4.model.context import Context
from dsv4.model.decoder import Decoder
from dsv4.model.execution import ENGINE, Execution
from dsv4.model.forward import Forward
from dsv4.model.presets import TINY
from dsv4.model.reserve import reserve
from dsv4.model.runner import Runner
from dsv4.options import Options
from dsv4.scheduler import Rows
from tests.dsv4.model.made import blocks_for, full_prefill, prompt
from workspace import simulated

MADE = Execution()


def runner(
    parts: int = 1, *, ws: Any = None, mode: str = "eager", blocks: int = 1000, engine: Any = ENGINE, **options: Any
) -> Runner:
    """A runner of the tiny model with caches for so many tokens in each micro-batch."""
    ws = ws or workspace.create("event_fenced", device="cpu", micro_batches=parts)
    chosen = Options(mode=mode, micro_batches=parts, **options)
    reserve(ws, MADE.shard, MADE.precision, engine, chosen)
    caches = [Caches(TINY, MADE.precision.storage, blocks_for(TINY, blocks)) for _ in range(parts)]
    return Runner(ws, MADE.shard, MADE.precision, engine, MADE.weights, caches, chosen)


def context(length: int, seed: int = 0) -> Context:
    return Context(prompt(TINY, length, seed), TINY.vocab_size, ENGINE.max_model_len)


def free(made: Runner) -> list[dict[str, int]]:
    return [{name: one.free_blocks for name, one in each.caches.allocators.items()} for each in made.decoders]


def alone(tokens: list[int]) -> torch.Tensor:
    """Logits of every position, from the decoder without a runner."""
    model = runner().decoders[0]
    return full_prefill(model, tokens)


def test_a_request_stays_where_it_began_and_new_ones_go_where_there_is_room() -> None:
    """Rows come back in the step's order, whichever micro-batch computed them."""
    made = runner(2)
    lengths = 71, 9, 30, 10
    contexts = {request: context(length, request) for request, length in enumerate(lengths)}
    wanted = [alone(one.tokens) for one in contexts.values()]
    with torch.no_grad():
        first = made.forward([Rows(i, 0, length - 1, True, True) for i, length in enumerate(lengths)], contexts)
        logits = made.logits(first.hidden)
    assert [made.home(one) for one in contexts.values()] == [0, 1, 1, 0]
    assert first.sampled == (69, 77, 106, 115) and first.residual is None  # nobody drafts
    assert (logits - torch.cat([one[:-1] for one in wanted])).abs().max() < 1e-4
    with torch.no_grad():
        rows = [Rows(i, lengths[i] - 1, 1, False, True) for i in (3, 1, 0, 2)]
        logits = made.logits(made.forward(rows, contexts).hidden)
    assert [made.home(one) for one in contexts.values()] == [0, 1, 1, 0]
    assert (logits - torch.stack([wanted[i][-1] for i in (3, 1, 0, 2)])).abs().max() < 1e-4


def test_a_step_that_does_not_fit_leaves_others_unharmed() -> None:
    """Its request is refused, and the others go on as if it had not been there."""
    made = runner(blocks=64)
    contexts = {0: context(40), 1: context(150, 1)}
    before = free(made)
    with torch.no_grad():
        made.forward([Rows(0, 0, 39, True, False)], contexts)
        with pytest.raises(CacheFull):
            for start in (0, 80):
                made.forward([Rows(1, start, 70, True, False)], contexts)
        contexts.pop(1).free()
        logits = made.logits(made.forward([Rows(0, 39, 1, False, True)], contexts).hidden)
    assert (logits - alone(contexts[0].tokens)[39:]).abs().max() < 1e-4
    contexts[0].free()
    assert free(made) == before


def test_a_refused_request_may_go_elsewhere_later() -> None:
    """It is bound to a micro-batch by the blocks it holds there, not by having asked for some."""
    made = runner(2, blocks=64)
    first, second, third = context(150), context(140, 1), context(150, 2)
    with torch.no_grad():
        made.forward([Rows(0, 0, 80, True, False)], {0: first})
        with pytest.raises(CacheFull):
            made.take([Rows(1, 0, 1400, True, False)], {1: second})
        assert made.home(second) == 1 and not second.holds(made.decoders[1].caches)
        made.forward([Rows(2, 0, 95, True, False)], {2: third})
        assert made.home(third) == 1 and made.home(second) == 0
        first.free()
        made.forward([Rows(1, 0, 60, True, False)], {1: second})
    assert made.home(second) == 0 and second.holds(made.decoders[0].caches)


def test_a_failing_kernel_leaves_no_lease_in_either_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error arrives while both are in the middle of the model; the next step computes what it should."""
    made = runner(2)
    rows = [Rows(0, 0, 30, True, True), Rows(1, 0, 20, True, True)]
    held = made.ws.snapshot().allocated

    plain = finish._experts

    def failing(f: Forward) -> None:
        if f.place == 2:
            raise ArithmeticError("on purpose")
        plain(f)

    with monkeypatch.context() as patch, torch.no_grad(), pytest.raises(ArithmeticError):
        patch.setattr(finish, "_experts", failing)
        made.forward(rows, {0: context(30), 1: context(20, 1)})
    assert made.ws.snapshot().allocated == held
    contexts = {0: context(30), 1: context(20, 1)}
    with torch.no_grad():
        logits = made.logits(made.forward(rows, contexts).hidden)
    assert (logits[:30] - alone(contexts[0].tokens)).abs().max() < 1e-4
    assert (logits[30:] - alone(contexts[1].tokens)).abs().max() < 1e-4


def test_caches_are_as_many_as_micro_batches() -> None:
    """And joins are dropped in the replay only, which has no caches."""
    made = runner()
    given = made.ws, MADE.shard, MADE.precision, ENGINE, MADE.weights, [made.decoders[0].caches]
    with pytest.raises(RunError, match="1 caches for 2 micro-batches"):
        Runner(*given, Options(micro_batches=2))
    with pytest.raises(RunError, match="drop_join"):
        Runner(*given, Options(drop_join="aux0"))


@pytest.mark.parametrize("device", ("cpu", "immediate"))
def test_graphs_are_refused_where_operators_cannot_be_captured(device: str) -> None:
    """Rather than replayed without effect."""
    ws = workspace.create("caching", device=device if device == "cpu" else simulated.Device(memory="host"))
    with pytest.raises(RunError, match="mode 'wide'.*cannot be captured"):
        runner(ws=ws, mode="wide")


def test_a_graph_is_captured_once_and_pads_what_is_smaller() -> None:
    """Steps of 33 to 40 tokens replay one graph; a longer one captures another, beyond the budget none does."""
    device = simulated.Device(memory="host", execution="deferred", seed=0)
    engine = attrs.evolve(ENGINE, max_num_batched_tokens=40)
    contexts = [context(length, length) for length in (33, 40, 5)]
    wanted = [alone(one.tokens).numpy() for one in contexts]  # a workspace of the host's, which the device cannot judge
    with torch.no_grad(), device:
        made = runner(ws=workspace.create("event_fenced", device=device), mode="narrow", engine=engine)
        captured = []
        for tokens, expected in zip(contexts, wanted, strict=True):
            length = len(tokens.tokens)
            found = made.logits(made.forward([Rows(0, 0, length, True, True)], {0: tokens}).hidden).numpy()
            captured.append(device.counters["begin_capture"])
            assert abs(found - expected).max() < 1e-4 and len(found) == length
            tokens.free()
        made.close()
    segments = 1 + len(TINY.layer_kinds)
    assert captured == [segments, segments, 2 * segments]
    assert device.verdict() == "SAFE"


def test_a_step_inside_a_capture_of_somebody_else() -> None:
    """As ``torch.cuda.graph`` around the model: a replay computes the step."""
    with simulated.Device(memory="host", execution="deferred") as device, torch.no_grad():
        ws = workspace.create("event_fenced", device=device, headroom=4.0)
        options = Options()
        reserve(ws, MADE.shard, MADE.precision, ENGINE, options)
        caches = Caches(TINY, MADE.precision.storage, blocks_for(TINY, 400))
        made = Decoder(ws, MADE.shard, MADE.precision, ENGINE, MADE.weights, caches)
        one = context(40)
        with ws.on(made.main):
            rows = [Rows(0, 0, 39, True, True)]
            wanted = made.logits(made.forward(rows, {0: one}).hidden).clone()
            walk = made.prepared(rows, {0: one})
            ws.synchronize()
            device.begin_capture(made.main.key)
            made.enqueue(walk)
            graph = device.end_capture(made.main.key)
            graph.launch(made.main.key)
            found = made.logits(walk.hidden)
        ws.synchronize()
        assert torch.equal(found, wanted)
        assert len(ws.snapshot().footprints) == 1 and device.verdict() == "SAFE"
