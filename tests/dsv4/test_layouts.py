"""Bytes per token of every temporary, against the table of dsv4.md section 7."""

from __future__ import annotations

import math

import pytest

from dsv4.config import LayerKind
from dsv4.errors import ModelConfigError
from dsv4.layouts import persistent_tensors, stage_layouts
from dsv4.presets import FLASH, PRO
from dsv4.shard import Shard

SWA, C4, C128 = LayerKind.SWA, LayerKind.C4, LayerKind.C128
TOKENS = 256  # a multiple of 4, so that row 29's rounding adds nothing

# Row: (stage, tensors, layer kind it is in, B/token at TP1, B/token at TP4), Flash, FP8 indexer, SM90.
FLASH_ROWS = {
    1: ("output", ("o",), SWA, 65536, 65536),
    2: ("inputs", ("x_fp8", "x_scale"), SWA, 4096 + 128, 4096 + 128),
    3: ("inputs", ("qr_kv",), SWA, 3072, 3072),
    "4 C4": ("inputs", ("kv_score",), C4, 8192, 8192),
    "4 C128": ("inputs", ("kv_score",), C128, 4096, 4096),
    5: ("inputs", ("idx_w",), C4, 128, 128),
    6: ("inputs", ("idx_kv_score",), C4, 2048, 2048),
    7: ("norms", ("qr",), SWA, 2048, 2048),
    8: ("norms", ("kv",), SWA, 1024, 1024),
    9: ("preparation", ("qr_fp8", "qr_scale"), SWA, 1056, 1056),
    10: ("preparation", ("q",), SWA, 65536, 16384),
    11: ("preparation", ("q_out",), SWA, 65536, 65536),
    12: ("preparation", ("idx_qr_fp8", "idx_qr_scale"), C4, 1056, 1056),
    13: ("preparation", ("idx_q",), C4, 16384, 16384),
    "14c": ("preparation", ("iq",), C4, 8192, 8192),
    15: ("preparation", ("iq_weights",), C4, 256, 256),
    16: ("preparation", ("compressed_kv",), C128, 2048, 2048),
    28: ("projection", ("o_fp8",), SWA, 32768, 8192),
    29: ("projection", ("o_scale",), SWA, 1024, 256),
    30: ("projection", ("z",), SWA, 16384, 4096),
    31: ("projection", ("z_fp8", "z_scale"), SWA, 8192 + 256, 2048 + 64),
    32: ("projection", ("attn_out",), SWA, 8192, 8192),
    "27 lse": ("attention", ("lse",), SWA, 256, 256),
    "residual": ("mhc_attn", ("residual",), SWA, 32768, 32768),
    "post": ("mhc_attn", ("post",), SWA, 16, 16),
    "comb": ("mhc_attn", ("comb",), SWA, 64, 64),
    "layer_in": ("mhc_attn", ("layer_in",), SWA, 8192, 8192),
}

PRO_ROWS = {
    1: ("output", ("o",), C4, 131072),
    2: ("inputs", ("x_fp8", "x_scale"), C4, 7168 + 224),
    3: ("inputs", ("qr_kv",), C4, 4096),
    7: ("norms", ("qr",), C4, 3072),
    10: ("preparation", ("q",), C4, 131072),
    11: ("preparation", ("q_out",), C4, 131072),
    28: ("projection", ("o_fp8",), C4, 65536),
    30: ("projection", ("z",), C4, 32768),
    32: ("projection", ("attn_out",), C4, 14336),
}


def nbytes(shard: Shard, kind: LayerKind, stage: str, tensors: tuple[str, ...], **dims: int) -> int:
    """Bytes of the tensors themselves, without alignment."""
    layout = stage_layouts(shard, kind)[stage]
    dims = {name: value for name, value in dims.items() if name in layout.dim_names}
    found = {extent.name: extent.nbytes for extent in layout.resolve(**dims).extents}
    return sum(found[name] for name in tensors)


STEP = {
    "T": TOKENS,
    "Td": TOKENS,
    "Tp": TOKENS,
    "L": 4096,
    "index_rows": 0,
    "index_keys": 0,
    "gather_keys": 0,
}


@pytest.mark.parametrize("row", FLASH_ROWS, ids=str)
def test_flash_bytes_per_token(row: object) -> None:
    stage, tensors, kind, alone, shared = FLASH_ROWS[row]
    assert nbytes(Shard(FLASH), kind, stage, tensors, **STEP) == alone * TOKENS
    assert nbytes(Shard(FLASH, tensor_parallel=4), kind, stage, tensors, **STEP) == shared * TOKENS


@pytest.mark.parametrize("row", PRO_ROWS)
def test_pro_bytes_per_token(row: int) -> None:
    stage, tensors, kind, expected = PRO_ROWS[row]
    assert nbytes(Shard(PRO), kind, stage, tensors, **STEP) == expected * TOKENS


def test_the_fp4_indexer_rows() -> None:
    """Rows 14a, 14b, 15: 4096 + 256 + 256, the 4608 B/token of the reverted pool's family A."""
    shard = Shard(FLASH, indexer="fp4", architecture="sm100")
    assert nbytes(shard, C4, "preparation", ("iq",), **STEP) == 4096 * TOKENS
    assert nbytes(shard, C4, "preparation", ("iq_scale",), **STEP) == 256 * TOKENS
    assert nbytes(shard, C4, "preparation", ("iq", "iq_scale", "iq_weights"), **STEP) == 4608 * TOKENS
    assert nbytes(shard, C4, "projection", ("o_scale",), **STEP) == 256 * TOKENS, "row 29 on SM100"


@pytest.mark.parametrize(("config", "global_indices", "combined"), [(FLASH, 2048, 2560), (PRO, 4096, 4608)])
def test_decode_and_prefill_rows_of_a_c4_layer(config: object, global_indices: int, combined: int) -> None:
    """Rows 19-26 follow the step: decode rows, prefill rows, gathered keys."""
    shard = Shard(config)  # type: ignore[arg-type]
    dims = {
        "T": 40,
        "Td": 32,
        "Tp": 8,
        "L": 1 << 20,
        "index_rows": 8,
        "index_keys": 1000,
        "gather_keys": 3000,
    }
    assert nbytes(shard, C4, "attention", ("global_indices",), **dims) == 32 * global_indices
    assert nbytes(shard, C4, "attention", ("global_lens",), **dims) == 32 * 4
    assert nbytes(shard, C4, "attention", ("combined_idx",), **dims) == 8 * combined
    assert nbytes(shard, C4, "attention", ("logits_decode",), **dims) == 32 << 20, "1 MiB a row at 1M context"
    assert nbytes(shard, C4, "attention", ("logits_prefill",), **dims) == 8 * 1000 * 4
    assert nbytes(shard, C4, "attention", ("k_quant", "k_scale"), **dims) == 1000 * (128 + 4)
    assert nbytes(shard, C4, "attention", ("kv_gather",), **dims) == 3000 * 1024
    assert nbytes(shard, C4, "attention", ("topk_workspace",), **dims) == 1 << 20
    assert nbytes(shard, C4, "attention", ("topk_workspace",), **(dims | {"Td": 0})) == 0


def test_index_widths_of_swa_and_c128_layers() -> None:
    dims = STEP | {"Tp": 1, "L": 1 << 20}
    assert nbytes(Shard(FLASH), SWA, "attention", ("combined_idx",), **dims) == 512
    assert nbytes(Shard(FLASH), C128, "attention", ("combined_idx",), **dims) == (8192 + 128) * 4


def test_the_pooled_rows_of_the_safe_static_plan() -> None:
    """156,164 B/token at TP1, 107,012 at TP4, FP4 indexer: the sum of what lives in stages C and D."""
    for ranks, expected in ((1, 156164), (4, 107012)):
        shard = Shard(FLASH, tensor_parallel=ranks, indexer="fp4", architecture="sm100")
        rows = ("q", "q_out", "idx_q", "iq", "iq_scale", "iq_weights")
        c4 = nbytes(shard, C4, "preparation", rows, **STEP)
        c4 += nbytes(shard, C4, "attention", ("global_indices", "global_lens"), **STEP)
        c128 = nbytes(shard, C128, "preparation", ("compressed_kv",), **STEP)
        assert c4 + c128 == expected * TOKENS


def test_no_tensor_of_a_lease_shares_a_byte_with_another() -> None:
    for kind in LayerKind:
        for layout in stage_layouts(Shard(FLASH), kind).values():
            dims = dict.fromkeys(layout.dim_names, 37)
            end = 0
            for extent in sorted(layout.resolve(**dims).extents, key=lambda extent: extent.offset):
                assert extent.offset >= end and extent.offset % 256 == 0, (layout, extent)
                end = extent.offset + extent.nbytes


@pytest.mark.parametrize(
    ("attention", "ranks", "padded"),
    [
        ("flashmla", 1, 64),
        ("flashmla", 4, 64),
        ("flashinfer", 4, 16),
        ("flashinfer", 2, 32),
        ("flashinfer", 8, 8),
    ],
)
def test_padded_heads(attention: str, ranks: int, padded: int) -> None:
    assert Shard(FLASH, tensor_parallel=ranks, attention=attention).padded_heads == padded


def test_pro_pads_to_128_until_two_ranks_share_its_heads() -> None:
    assert Shard(PRO).padded_heads == 128
    assert Shard(PRO, tensor_parallel=2).padded_heads == 64


def test_an_impossible_shard_lists_everything() -> None:
    with pytest.raises(ModelConfigError) as refused:
        Shard(FLASH, tensor_parallel=3, indexer="fp4", attention="xformers", rank=3)
    assert len(refused.value.problems) == 7


def test_persistent_index_tensors() -> None:
    """dsv4.md section 7: C128 index rows of 1M context take 256 MiB at 8192 tokens."""
    found = persistent_tensors(Shard(FLASH), tokens=8192, context=1 << 20)
    size = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in found.items()}
    assert size["decode_c128_indices"] == size["prefill_c128_indices"] == 256 << 20
    assert size["topk_indices"] == 8192 * 2048
    assert size["compressed_slots"] == 8192 * 8
