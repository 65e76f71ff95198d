"""What the kernels compute: against the references, on random and adversarial data, at every size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4.cache.pages import Format
from tests.dsv4.cache import encoder
from tests.dsv4.cuda.calls import FAMILIES, call
from tests.dsv4.cuda.check import bits, check

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
    *(("q_norm_rope_kv_insert", {"inserted": m}) for m in (0, 1, 20)),
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
]  # fmt: skip


@pytest.mark.parametrize(("name", "how"), SHAPES, ids=lambda one: one if isinstance(one, str) else str(one))
def test_other_shapes(name: str, how: dict[str, Any]) -> None:
    """Heads with padding, block sizes, short slot mappings, unaligned page strides, V4-Pro's widths."""
    check(call(name, 37, **how))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "slots" not in name])
def test_nan_stays_in_its_row(name: str) -> None:
    """The activations of row 2 are NaN; every other row is what it was."""
    wanted = call(name, 9).poison(0xFF).run()
    spoilt = call(name, 9)
    spoilt.inputs[0][2] = float("nan")
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
    from dsv4.ops.math import rotated

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
