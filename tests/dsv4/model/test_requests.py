"""What is refused, and that nothing of it is left behind."""

from __future__ import annotations

import attrs
import pytest
import torch

from dsv4.cache.errors import CacheFull
from dsv4.errors import RequestError
from dsv4.model import finish
from dsv4.model.decoder import Decoder
from dsv4.model.forward import Forward
from dsv4.model.presets import MIXED
from tests.dsv4.model.made import ENGINE, context, decoder, full_prefill, prompt, step


def free(model: Decoder) -> dict[str, int]:
    return {name: one.free_blocks for name, one in model.caches.allocators.items()}


def test_an_impossible_prompt_is_refused_before_anything_is_taken() -> None:
    """Empty, out of the vocabulary, not an integer, or longer than the engine's contexts."""
    model = decoder(MIXED)
    before = free(model)
    for tokens, says in (([], "empty"), ([MIXED.vocab_size], "outside the vocabulary"), ([-1], "outside"),
                         ([1.0], "outside"), ([1] * 1025, "above the 1024")):  # fmt: skip
        with pytest.raises(RequestError, match=says):
            context(model, tokens)
    assert free(model) == before


def test_generation_beyond_the_engines_contexts_is_refused() -> None:
    """The tokens so far stay."""
    one = context(decoder(MIXED), [1] * 1024)
    with pytest.raises(RequestError, match="max_model_len"):
        one.append([1])
    assert len(one.tokens) == 1024


def test_a_request_that_does_not_fit_leaves_the_others_as_they_were() -> None:
    """The second prompt is refused; the first one's next token is what it would have been alone."""
    model = decoder(MIXED, capacity=384)
    tokens = prompt(MIXED, 300)
    alone = full_prefill(model, tokens)
    everything = free(model)
    first, second = context(model, tokens), context(model, prompt(MIXED, 900, 1))
    step(model, {0: first}, (0, 0, 299, True))
    with pytest.raises(CacheFull):
        step(model, {0: first, 1: second}, (0, 299, 1, False), (1, 0, 900, True))
    logits = step(model, {0: first}, (0, 299, 1, False))[1]
    assert (logits[0] - alone[299]).abs().max() <= 1e-4
    second.free()
    first.free()
    assert free(model) == everything


def test_a_cancelled_request_gives_its_blocks_to_the_next() -> None:
    """In the middle of its prompt; what the next one reads is its own."""
    model = decoder(MIXED, capacity=256)
    everything = free(model)
    cancelled = context(model, prompt(MIXED, 400, 1))
    step(model, {0: cancelled}, (0, 0, 250, True))
    cancelled.free()
    assert free(model) == everything
    tokens = prompt(MIXED, 250)
    fresh = full_prefill(decoder(MIXED, capacity=256), tokens)
    assert torch.equal(full_prefill(model, tokens), fresh)


def test_a_failing_kernel_leaves_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error arrives, every lease is back, and the next step computes what it should."""
    model, tokens = decoder(MIXED), prompt(MIXED, 60)
    wanted = full_prefill(model, tokens)

    plain = finish._experts

    def failing(f: Forward) -> None:
        if f.place == 2:
            raise ArithmeticError("on purpose")
        plain(f)

    held = model.ws.snapshot().allocated
    with monkeypatch.context() as patch:
        patch.setattr(finish, "_experts", failing)
        with pytest.raises(ArithmeticError):
            full_prefill(model, tokens)
    assert model.ws.snapshot().allocated == held
    assert torch.equal(full_prefill(model, tokens), wanted)


def test_an_engine_of_short_contexts_is_enough_for_short_contexts() -> None:
    """Limits size the scratch: the logits do not depend on them."""
    tokens = prompt(MIXED, 130)
    short = attrs.evolve(ENGINE, max_model_len=256, max_num_batched_tokens=256)
    difference = full_prefill(decoder(MIXED, engine=short), tokens) - full_prefill(decoder(MIXED), tokens)
    assert difference.abs().max() <= 1e-4
