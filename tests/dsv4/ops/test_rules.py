"""Arguments that do not fit together are typed errors, in both forms, before any kernel runs; those that fit pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4.cache.pages import Format
from dsv4.ops import Op, OpError
from dsv4.ops.op import _none
from tests.dsv4.ops.calls import arguments, forms, written
from tests.dsv4.ops.samples import DIMS, HEADS, OPS, WIDTH, T, outs, sample

NAMES = sorted(OPS)
Change = dict[str, Any]


def changed(given: dict[str, Any], changes: Change) -> dict[str, Any]:
    return given | {name: to(given[name]) if callable(to) else to for name, to in changes.items()}


def narrow(one: torch.Tensor) -> torch.Tensor:
    return one[..., :-1].contiguous()


def longer(one: torch.Tensor) -> torch.Tensor:
    return torch.cat([one, one[:1]])


def none_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


PLAIN = int(Format.PLAIN)
BYTES = none_of(8, 4 * WIDTH, dtype=torch.uint8)

UNFIT: list[tuple[str, Change, str]] = [
    ("store_compressed", {"ratio": 0}, "ratio of store_compressed is 0"),
    ("store_compressed", {"cos_sin": none_of(512, WIDTH + 2)}, f"cos_sin of store_compressed has {WIDTH + 2} columns"),
    ("store_compressed", {"cos_sin": none_of(512, 62)}, "cache of store_compressed has no FP8_DS_MLA states of 128"),
    ("compress", {"ratio": -1}, "ratio of compress is -1"),
    ("compress", {"overlap": False}, "state of compress has another width than norm_weight"),
    ("compress", {"norm_weight": longer}, "state of compress has another width than norm_weight"),
    ("pool_states", {"ratio": -1}, "ratio of pool_states is -1"),
    ("pool_states", {"ratio": 2**31}, "ratio of pool_states is 2147483648"),
    ("pool_states", {"overlap": False}, "state of pool_states has another width than pooled"),
    ("pool_states", {"state": none_of(96, 0, 4 * WIDTH)}, "state of pool_states has no rows"),
    ("save_partial_states", {"ape": none_of(0, 128)}, "has no rows, or ape none"),
    ("save_partial_states", {"state": none_of(3, 0, 256)}, "has no rows, or ape none"),
    ("save_partial_states", {"kv_score": narrow, "ape": narrow, "state": narrow}, "kv_score .* has 255 columns"),
    ("global_top_k", {"block_size": 0}, "block_size of global_top_k is 0"),
    ("global_top_k", {"block_size": -1}, "block_size of global_top_k is -1"),
    ("global_top_k", {"block_size": 2**20}, "block_size of global_top_k is 1048576"),
    ("indexer_logits", {"q_scales": none_of(T, 16, 8, dtype=torch.uint8)}, "q_scales of indexer_logits do not fit q"),
    ("indexer_logits", {"format": PLAIN}, "cache of indexer_logits has another dtype"),
    ("indexer_logits", {"logits": lambda one: narrow(one[..., :8])}, "counts of indexer_logits reach 8, and logits"),
    ("indexer_top_k", {"logits": narrow}, "counts of indexer_top_k reach 12, and logits have 11 columns"),
    ("indexer_q_rope", {"cos_sin": narrow}, "cos_sin of indexer_q_rope has 63 columns"),
    ("indexer_q_rope_fp8", {"cos_sin": narrow}, "cos_sin of indexer_q_rope_fp8 has 63 columns"),
    ("indexer_q_rope_fp8", {"cos_sin": none_of(512, 0)}, "cos_sin of indexer_q_rope_fp8 has 0 columns"),
    ("indexer_q_rope_fp4", {"cos_sin": narrow}, "cos_sin of indexer_q_rope_fp4 has 63 columns"),
    ("indexer_q_rope_fp4", {"q": narrow, "q_out": lambda one: one[..., :63].contiguous(),
                            "scales_out": narrow}, "heads 127 wide"),
    ("inverse_rope", {"heads": 0}, "heads of inverse_rope is 0"),
    ("inverse_rope", {"heads": 9}, "heads of inverse_rope is 9"),
    ("inverse_rope", {"heads": HEADS - 1}, "grouped of inverse_rope does not divide the heads"),
    ("inverse_rope", {"grouped": longer}, "grouped of inverse_rope does not divide the heads"),
    ("inverse_rope", {"grouped": none_of(0, T, 256)}, "grouped of inverse_rope does not divide the heads"),
    ("inverse_rope", {"grouped": lambda one: one[:1]}, "grouped of inverse_rope has another width"),
    ("inverse_rope_fp8", {"heads": 2 * HEADS}, "grouped of inverse_rope_fp8 has another width"),
    ("q_norm_rope_kv_insert", {"slots": torch.arange(T + 1)}, "slots of q_norm_rope_kv_insert are more than tokens"),
    ("q_norm_rope_kv_insert", {"q_out": lambda one: one[:, : HEADS - 1].contiguous()}, "has fewer heads than q"),
    ("q_norm_rope_kv_insert", {"block_size": 0}, "block_size of q_norm_rope_kv_insert is 0"),
    ("gather_keys", {"rope": -1}, "rope of gather_keys is -1"),
    ("gather_keys", {"rope": 3}, "cache of gather_keys has no FP8_DS_MLA states"),
    ("gather_keys", {"starts": torch.tensor([2, 9, 6], dtype=torch.int32)}, "do not ascend from 0 to 12"),
    ("gather_keys", {"starts": torch.tensor([0, 9, 10**9], dtype=torch.int32)}, "do not ascend from 0 to 12"),
    ("sparse_attention_decode", {"extra_cache": None}, "comes without its slots and lens, or they without it"),
    ("sparse_attention_decode", {"extra_lens": None}, "comes without its slots and lens, or they without it"),
    ("sparse_attention_decode", {"extra_block_size": 0}, "extra_block_size of sparse_attention_decode is 0"),
    ("sparse_attention_decode", {"format": PLAIN}, "window_cache of sparse_attention_decode has another dtype"),
    ("combine_indices", {"ratio": -1}, "ratio of combine_indices is -1"),
    ("combine_indices", {"window": -1}, "window of combine_indices is -1"),
    ("route", {"experts": none_of(T, 9, dtype=torch.int32), "weights": none_of(T, 9)}, "experts of route has 9"),
    ("route", {"table": torch.full((T, 3), 8)}, "table of route names experts that logits have not"),
    ("route", {"table": torch.full((T, 3), -1)}, "table of route names experts that logits have not"),
    ("swiglu", {"gate_up": narrow, "act": lambda one: one[:, :9].contiguous()}, "gate_up of swiglu has 19 columns"),
    ("routed_experts", {"experts": lambda one: one + 97}, "21 of 21 experts are none of the 5 there are"),
    ("routed_experts", {"experts": none_of(T, 0, dtype=torch.int32), "weights": none_of(T, 0),
                        **{name: lambda one: one[:0] for name in ("rows", "gate_up", "act", "down")}}, "has 0 columns"),
    ("indexer_q_rope", {"positions": torch.full((T,), 10**6)}, "index 1000000 is out of bounds"),
]  # fmt: skip
"""An op, what is changed of its sample, and what the refusal says."""

IDS = [f"{name}-{'-'.join(changes)}-{number}" for number, (name, changes, _) in enumerate(UNFIT)]


@pytest.mark.parametrize(("name", "changes", "says"), UNFIT, ids=IDS)
def test_what_does_not_fit_is_refused(name: str, changes: Change, says: str) -> None:
    op = OPS[name]
    for form in forms(op):
        with pytest.raises(OpError, match=says):
            form(op, changed(arguments(name), changes))


@pytest.fixture
def lawless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    """An op without its rules."""
    op = OPS[request.param]
    monkeypatch.setattr(op, "_rules", _none)
    monkeypatch.setattr(op._check, "_rules", _none)
    yield op
    op._check._sound.clear()


BARE = [
    ("store_compressed", {"ratio": 0}),
    ("pool_states", {"overlap": False}),
    ("save_partial_states", {"ape": none_of(0, 128)}),
    ("global_top_k", {"block_size": -1}),
    ("indexer_q_rope", {"cos_sin": narrow}),
    ("inverse_rope", {"grouped": longer}),
    ("q_norm_rope_kv_insert", {"slots": torch.arange(T + 1)}),
    ("gather_keys", {"rope": 3}),
    ("route", {"experts": none_of(T, 9, dtype=torch.int32), "weights": none_of(T, 9)}),
]


@pytest.mark.parametrize(("lawless", "changes"), BARE, indirect=["lawless"], ids=[name for name, _ in BARE])
def test_the_rules_refuse_it(lawless: Op, changes: Change) -> None:
    """Control: without them it is whatever the reference runs into."""
    with pytest.raises((RuntimeError, OpError)) as raised:
        written(lawless, changed(arguments(lawless.name), changes))
    assert not isinstance(raised.value, OpError) or "out of bounds" in str(raised.value)


FITTING: list[tuple[str, Change]] = [
    ("inverse_rope", {"heads": 8, "grouped": none_of(4, T, 2 * WIDTH)}),
    ("inverse_rope", {"heads": 6, "grouped": none_of(1, T, 6 * WIDTH)}),
    ("indexer_q_rope", {"cos_sin": none_of(512, 128)}),
    ("indexer_q_rope_fp4", {"cos_sin": none_of(512, 2)}),
    ("pool_states", {"overlap": False, "pooled": none_of(T, 2 * WIDTH)}),
    ("pool_states", {"ratio": 1}),
    ("q_norm_rope_kv_insert", {"slots": torch.arange(2), "q_out": none_of(T, HEADS, WIDTH)}),
    ("sparse_attention_decode", dict.fromkeys(("extra_cache", "extra_slots", "extra_lens")) | {"extra_block_size": 0}),
    ("combine_indices", {"ratio": 0, "window": 0}),
    ("combine_indices", {"chosen": none_of(T, 0, dtype=torch.int32)}),
    ("indexer_top_k", {"counts": torch.full((T,), -1, dtype=torch.int32)}),
    ("route", {"table": torch.full((T, 3), 7)}),
    ("route", {"experts": none_of(T, 8, dtype=torch.int32), "weights": none_of(T, 8)}),
    ("global_top_k", {"block_size": np.int64(4)}),
    ("global_top_k", {"block_size": torch.tensor(4)}),
    ("pool_states", {"overlap": 1}),
    ("rms_norm", {"eps": np.float32(1e-6)}),
    ("rms_norm", {"eps": 1}),
]


@pytest.mark.parametrize("name", NAMES)
def test_samples_fit(name: str) -> None:
    for form in forms(OPS[name]):
        form(OPS[name], arguments(name))


@pytest.mark.parametrize(("name", "changes"), FITTING, ids=[f"{name}-{'-'.join(change)}" for name, change in FITTING])
def test_what_fits_at_the_edge_passes(name: str, changes: Change) -> None:
    for form in forms(OPS[name]):
        form(OPS[name], changed(arguments(name), changes))


def test_a_sound_call_vouches_for_its_numbers_only() -> None:
    """Shapes that have passed are not asked again, but with other numbers they are."""
    op, given = OPS["global_top_k"], arguments("global_top_k")
    written(op, given)
    with pytest.raises(OpError, match="block_size of global_top_k is 0"):
        written(op, given | {"block_size": 0})


def test_nothing_is_written_by_a_call_that_does_not_fit() -> None:
    given = arguments("q_norm_rope_kv_insert")
    cache, q_out = given["cache"].clone(), given["q_out"].fill_(5)
    with pytest.raises(OpError):
        written(OPS["q_norm_rope_kv_insert"], given | {"slots": torch.arange(T + 1)})
    assert given["cache"].equal(cache) and q_out.eq(5).all()


def test_without_tokens_the_rules_hold() -> None:
    """As they do in a CUDA kernel, though nothing would run."""
    given = arguments("global_top_k")
    none = {name: one[:0] for name, one in given.items() if isinstance(one, torch.Tensor) and name != "table"}
    written(OPS["global_top_k"], given | none)
    with pytest.raises(OpError, match="block_size"):
        written(OPS["global_top_k"], given | none | {"block_size": 0})


# -- tensors without bytes ---------------------------------------------------------------------------------

STATIC = [
    one for one in UNFIT if not any(text in one[2] for text in ("reach", "ascend", "names experts", "index", "21 of"))
]
"""What shapes and numbers alone say."""


@pytest.mark.parametrize(("name", "changes", "says"), STATIC, ids=[one[0] for one in STATIC])
@pytest.mark.parametrize("kind", ("meta", "fake"))
def test_shapes_are_judged_without_bytes(name: str, changes: Change, says: str, kind: str) -> None:
    """A fitting call passes."""
    op, mode = OPS[name], FakeTensorMode()

    def bare(given: dict[str, Any]) -> dict[str, Any]:
        turned = mode.from_tensor if kind == "fake" else lambda one: one.to("meta")
        return {key: turned(one) if isinstance(one, torch.Tensor) else one for key, one in given.items()}

    written(op, bare(arguments(name)))
    with pytest.raises(OpError, match=says):
        written(op, bare(changed(arguments(name), changes)))


def test_sizes_that_are_symbols_are_not_judged() -> None:
    """Asking them would bind them; the kernel does, when it runs."""
    o, positions, table, heads = sample("inverse_rope")

    def function(o: torch.Tensor, positions: torch.Tensor) -> Any:
        return OPS["inverse_rope"].returning(o, positions, table, heads, **DIMS["inverse_rope"])

    graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(o, positions)
    assert graph(o[:3], positions[:3]).shape == (2, 3, 2 * WIDTH)
    with pytest.raises(OpError, match="grouped of inverse_rope has another width"):
        graph(o[:3, :, :-2].contiguous(), positions[:3])


def test_compiled_code_is_refused_when_it_runs() -> None:
    """It calls the op without its face."""
    *inputs, _ = sample("global_top_k")
    made, _ = outs("global_top_k", sample("global_top_k"))
    run = torch.compile(lambda size: OPS["global_top_k"](*inputs, size, out=made), backend="eager", dynamic=True)
    run(4)
    with pytest.raises(OpError, match="block_size of global_top_k is 0"):
        run(0)
