"""What the kernels compute: against the references, on random and adversarial data, at every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.kernels.calls import call
from dsv4.cache.pages import Format
from dsv4.ops.math import rotated
from tests.dsv4.cache import encoder
from tests.dsv4.cuda.check import bits, check
from tests.dsv4.cuda.families import FAMILIES
from tests.dsv4.ops.samples import OPS

ROWS = (1, 2, 7, 17, 64, 257, 512, 1023, 2048, 8192)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_size(name: str, rows: int) -> None:
    """Every element written: the outs are poisoned first."""
    check(call(name, rows))


@pytest.mark.parametrize(
    ("name", "data"), [(name, data) for name, one in FAMILIES.items() for data in one.data if data != "random"]
)
def test_adversarial_values(name: str, data: str) -> None:
    """All equal, huge, tiny, zero, and rows of very different sizes."""
    check(call(name, 33, data))


SHAPES: list[tuple[str, dict[str, Any]]] = [
    *(("q_norm_rope_kv_insert", {"heads": n, "padded": p})
      for n, p in ((1, 8), (8, 8), (8, 16), (16, 16), (16, 64), (3, 5), (64, 128), (128, 128))),
    *(("q_norm_rope_kv_insert", {"block": b}) for b in (1, 2, 16, 100)),
    *(("q_norm_rope_kv_insert", {"inserted": m}) for m in (0, 1, 20, 37)),
    *(("q_norm_rope_kv_insert", {"stride": s}) for s in (1, 8, 24)),
    ("q_norm_rope_kv_insert", {"layout": Format.PLAIN}),
    ("q_norm_rope_kv_insert", {"layout": Format.PLAIN, "block": 3, "inserted": 9}),
    ("q_kv_rmsnorm", {"q": 1536}),
    ("q_kv_rmsnorm", {"q": 40}),
    ("q_kv_rmsnorm", {"weights": torch.bfloat16}),
    ("rms_norm", {"width": 7168}),
    ("rms_norm", {"width": 512}),
    *((name, {"heads": heads}) for name in ("indexer_q_rope", "indexer_q_rope_fp8", "indexer_q_rope_fp4")
      for heads in (1, 7, 16, 65)),
    *((name, how) for name in ("inverse_rope", "inverse_rope_fp8")
      for how in ({"heads": 16}, {"heads": 128, "padded": 128, "groups": 16}, {"heads": 2, "padded": 8, "groups": 1})),
    ("save_partial_states", {"width": 1024, "ratio": 128, "block": 8}),
    ("save_partial_states", {"width": 512}),
    ("pool_states", {"ratio": 4, "overlap": True, "block": 4}),
    ("pool_states", {"width": 128, "ratio": 4, "overlap": True, "block": 4}),
    *(("store_compressed", {"layout": one, "ratio": 4, "block": b, "stride": s})
      for one in (Format.FP8_DS_MLA, Format.INDEXER_FP8, Format.INDEXER_FP4) for b, s in ((64, 0), (16, 8), (2, 1))),
    ("store_compressed", {"layout": Format.PLAIN, "ratio": 4}),
    ("store_compressed", {"weights": torch.bfloat16}),
    *(("compress", {"layout": one, "block": b, "stride": s})
      for one in (Format.FP8_DS_MLA, Format.INDEXER_FP8, Format.INDEXER_FP4) for b, s in ((64, 0), (16, 8), (2, 1))),
    ("compress", {"layout": Format.PLAIN}),
    *(("indexer_logits", {"layout": one, **how}) for one in (Format.INDEXER_FP8, Format.INDEXER_FP4)
      for how in ({}, {"heads": 16}, {"heads": 5}, {"keys": 15}, {"keys": 5000}, {"block": 16}, {"stride": 1},
                  {"block": 7})),
    *(("indexer_top_k", {"k": k, "width": w}) for k in (1, 512, 1024) for w in (1, 700, 1024, 40000)),
    ("global_top_k", {"k": 1024}),
    ("global_top_k", {"k": 5, "block": 2}),
    ("gather_keys", {"layout": Format.PLAIN}),
    ("gather_keys", {"block": 2}),
    *(("sparse_attention_decode", {"padded": p}) for p in (1, 8, 16, 65, 128)),
    *(("sparse_attention_decode", {"splits": s}) for s in (1, 2, 3, 10)),
    *(("sparse_attention_decode", how) for how in (
        {"extra": 0}, {"extra": 0, "splits": 2}, {"extra": 1024}, {"full": True}, {"layout": Format.PLAIN},
        {"layout": Format.PLAIN, "splits": 4}, {"extra_block": 2}, {"window": 7, "extra": 30, "splits": 2},
        {"padded": 128, "splits": 2})),
    *(("sparse_attention_prefill", how) for how in (
        {"padded": 16}, {"padded": 128}, {"listed": 1}, {"listed": 64, "full": True}, {"listed": 1500})),
    *(("route", how) for how in (
        {"experts": 8, "k": 3}, {"experts": 384}, {"experts": 1000, "k": 32}, {"hashed": True})),
    *(("swiglu", {"inner": inner}) for inner in (8, 3072)),
    *((name, {"hidden": h}) for name in ("mhc_pre", "mhc_post", "mhc_post_pre", "hc_head") for h in (256, 7168)),
    ("hc_head", {"weights": torch.bfloat16}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how"), SHAPES, ids=lambda one: one if isinstance(one, str) else str(one))
def test_other_shapes(name: str, how: dict[str, Any]) -> None:
    """Heads with padding, block sizes, short slot mappings, unaligned page strides, V4-Pro's widths."""
    check(call(name, 37, **how))


def by_row(name: str) -> bool:
    """Whether the first input's rows and every out's are the tokens."""
    op = OPS[name]
    first = next(iter(op.inputs.values()))
    return bool(op.outs) and first.shape[0] in ("T", "N") and name not in ("indexer_top_k", "global_top_k")


@pytest.mark.parametrize("name", [name for name in FAMILIES if by_row(name)])
def test_nan_stays_in_its_row(name: str) -> None:
    """The activations of row 2 are NaN; every other row is what it was."""
    wanted = call(name, 9).poison(0xFF).run()
    spoilt = call(name, 9)
    spoilt.inputs[0].view(torch.uint8)[2] = 0xFF  # NaN in bfloat16 and in FP8
    found = spoilt.poison(0xFF).run()
    for axes, one, other in zip(spoilt.op.outs.values(), found, wanted, strict=False):
        axis = next(axis for axis, dim in enumerate(axes.shape) if dim in ("T", "N", "(T+3)//4*4"))
        if axes.shape[-1] == "(T+3)//4*4":
            axis = 2
        kept = torch.tensor([row for row in range(9) if row != 2], device="cuda")
        assert torch.equal(bits(one.index_select(axis, kept)), bits(other.index_select(axis, kept)))


def test_inserted_bytes_are_the_encoders() -> None:
    """Bit by bit, by the independent encoder, over values of very different sizes."""
    made = call("q_norm_rope_kv_insert", 12, "mixed", block=4)
    _, cache = made.run()
    kv, slots, positions, cos_sin = made.inputs[1], made.inputs[3], made.inputs[4], made.inputs[5]
    rows = rotated(kv.float(), cos_sin[positions]).cpu()
    wanted = torch.zeros_like(cache).cpu()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        state, scales = encoder.mla_state(rows[row].tolist())
        page, at = wanted[slot // 4], slot % 4
        page[at * 576 : at * 576 + 576] = torch.tensor(list(state), dtype=torch.uint8)
        page[4 * 576 + at * 8 : 4 * 576 + at * 8 + 8] = torch.tensor(list(scales), dtype=torch.uint8)
    assert torch.equal(cache.cpu(), wanted)
