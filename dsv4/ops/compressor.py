"""Compressors: states saved token by token, pooled where a group of tokens is complete, inserted into a cache.

C4 pools 8 tokens (the group and the one before it, coff = 2), C128 the 128 of its group (coff = 1). vLLM:
``compressor.py``, ``common/ops/save_partial_states.py``, ``common/ops/fused_compress_quant_cache.py``.
"""

from __future__ import annotations

import torch

from dsv4.cache.pages import Format, pages_of
from dsv4.cache.quantise import Floor
from dsv4.ops.argument import ANY, FLOAT, I32, I64, U8, WIDE, argument
from dsv4.ops.math import normed, rotated, wide
from dsv4.ops.op import Op
from dsv4.ops.rules import Call, group, paged, rotation

POOL_ROWS = 1 << 22
"""Elements of a pooling window that the reference holds at a time."""


def _save_partial_states(
    kv_score: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, state: torch.Tensor
) -> None:
    """state[slot] = [kv | score + ape[position % ratio]]; slots below 0 are skipped.

    Parameters
    ----------
    kv_score
        [T, 2C], the compressor's projections: C columns of kv, C of score.
    ape
        [ratio, C].
    positions, slots
        int64 [T].
    state
        [blocks, rows, 2C], mutated.
    """
    kept = (slots >= 0).nonzero().squeeze(1)
    block, row = slots[kept] // state.shape[1], slots[kept] % state.shape[1]
    kv, score = kv_score[kept].to(state.dtype).chunk(2, 1)
    state[block, row] = torch.cat((kv, score + ape[positions[kept] % ape.shape[0]].to(state.dtype)), 1)


def _pool_states(
    state: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    request: torch.Tensor,
    slots: torch.Tensor,
    ratio: int,
    overlap: bool,
    pooled: torch.Tensor,
) -> None:
    """Softmax-gated pooling of each complete group: c_d = sum_r softmax_r(score[r, d]) * kv[r, d].

    Only rows with slots >= 0 are written; the caller gives those to the last tokens of groups. With overlap the group
    before contributes the first half of its columns, the group itself the second. Positions below 0 weigh nothing.

    Parameters
    ----------
    state
        [blocks, rows, 2C], C = D, or 2D with overlap.
    table
        int32 [R, B], blocks of each request's states.
    positions
        int64 [T].
    request
        int32 [T], row of the table.
    slots
        int64 [T], where the group's state will go.

    Returns
    -------
    pooled
        [T, D].
    """
    width = pooled.shape[1]
    window = ratio * (2 if overlap else 1)
    kept = (slots >= 0).nonzero().squeeze(1)
    back = torch.arange(window, device=state.device) - (window - 1)
    for rows in kept.split(max(1, POOL_ROWS // (window * width or 1))):
        at = positions[rows, None] + back
        there = at >= 0
        at = at.clamp(min=0)
        block = table[request[rows].long()[:, None], at // state.shape[1]].long()
        kv, score = wide(state[block.clamp(min=0), at % state.shape[1]]).chunk(2, 2)
        if overlap:
            kv, score = (torch.cat((part[:, :ratio, :width], part[:, ratio:, width:]), 1) for part in (kv, score))
        # A row that holds nothing yet may hold anything: neither its score nor its kv may reach the sum.
        score = score.masked_fill(~there[..., None], float("-inf"))
        kv = kv.masked_fill(~there[..., None], 0)
        pooled[rows] = (score.softmax(1) * kv).sum(1)


def _store_compressed(
    pooled: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    ratio: int,
    eps: float,
    block_size: int,
    format: int,
) -> None:
    """RMSNorm of pooled states, RoPE at their group's first position, quantisation and insert.

    Parameters
    ----------
    pooled
        [T, D]; rows with slots below 0 are not read.
    norm_weight
        [D].
    cos_sin
        [*, R].
    positions, slots
        int64 [T].
    cache
        Mutated; see `dsv4.cache.pages`.
    block_size, format
        States of a page, and a `Format`. ``fp8_ds_mla`` scales keep vLLM's floor of 1e-4 (`Floor.SCALE`).
    """
    kept = (slots >= 0).nonzero().squeeze(1)
    rows = normed(pooled[kept], eps) * wide(norm_weight)
    rows = rotated(rows, cos_sin[positions[kept] // ratio * ratio])
    kind = Format(format)
    rule = Floor.SCALE if kind is Format.FP8_DS_MLA else Floor.ABSMAX
    pages = pages_of(kind, pooled.shape[1], cos_sin.shape[1], block_size, cache.dtype)
    pages.write(cache, slots[kept], rows, rule)


def _compress(
    state: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    request: torch.Tensor,
    slots: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: torch.Tensor,
    ratio: int,
    overlap: bool,
    eps: float,
    block_size: int,
    format: int,
) -> None:
    """`pool_states` and `store_compressed` in one, without scratch: C4 and the indexer."""
    kept = (slots >= 0).nonzero().squeeze(1)
    pooled = state.new_empty(len(kept), norm_weight.shape[0])
    _pool_states(state, table, positions[kept], request[kept], slots[kept], ratio, overlap, pooled)
    _store_compressed(pooled, norm_weight, cos_sin, positions[kept], slots[kept], cache, ratio, eps, block_size, format)


def _save_rules(call: Call) -> None:
    width = call["kv_score"].shape[1]
    call.require(width % 2 == 0, "kv_score", f"has {width} columns", "pass kv and score of one width")
    call.require(
        call["state"].shape[1] > 0 and call["ape"].shape[0] > 0,
        "state",
        "has no rows, or ape none",
        "pass the states of a page and the tokens of a group",
    )


def _pools(call: Call, width: int, named: str) -> None:
    group(call)
    rows, columns = call["state"].shape[1:]
    call.require(rows > 0, "state", "has no rows", "pass the states of a page")
    halves = "both halves" if call["overlap"] else "its columns"
    call.require(
        columns == width * (4 if call["overlap"] else 2),
        "state",
        f"has another width than {named}",
        f"pass kv and score of {halves}",
    )


def _store_rules(call: Call) -> None:
    width = call["norm_weight"].shape[0]
    group(call)
    rotation(call, width)
    paged(call, "cache", "block_size", width, call["cos_sin"].shape[1])


def _compress_rules(call: Call) -> None:
    _pools(call, call["norm_weight"].shape[0], "norm_weight")
    _store_rules(call)


_ROWS = {
    "positions": argument("T", dtype=I64),
    "request": argument("T", dtype=I32),
    "slots": argument("T", dtype=I64),
}
_CACHE = {
    "norm_weight": argument("D", dtype=FLOAT),
    "cos_sin": argument("L", "R", dtype=FLOAT),
    "cache": argument(*ANY, dtype=(*FLOAT, U8)),
}
_STATE = {
    "state": argument("blocks", "rows", "C", dtype=(torch.float32, torch.float64)),
    "table": argument("requests", "B", dtype=I32),
}

save_partial_states = Op(
    "save_partial_states(Tensor kv_score, Tensor ape, Tensor positions, Tensor slots, Tensor(a!) state) -> ()",
    _save_partial_states,
    inputs={
        "kv_score": argument("T", "C"),
        "ape": argument("ratio", "C//2", dtype=FLOAT),
        "positions": argument("T", dtype=I64),
        "slots": argument("T", dtype=I64),
        "state": argument("blocks", "rows", "C", dtype=WIDE),
    },
    rules=_save_rules,
)
pool_states = Op(
    "pool_states(Tensor state, Tensor table, Tensor positions, Tensor request, Tensor slots, int ratio, bool overlap, "
    "Tensor(a!) pooled) -> ()",
    _pool_states,
    inputs={**_STATE, "state": argument("blocks", "rows", "C"), **_ROWS},
    outs={"pooled": argument("T", "D", dtype=WIDE, partly=True)},
    rules=lambda call: _pools(call, call["pooled"].shape[1], "pooled"),
)
store_compressed = Op(
    "store_compressed(Tensor pooled, Tensor norm_weight, Tensor cos_sin, Tensor positions, Tensor slots, "
    "Tensor(a!) cache, int ratio, float eps, int block_size, int format) -> ()",
    _store_compressed,
    inputs={
        "pooled": argument("T", "D", dtype=(torch.float32, torch.float64)),
        **_CACHE,
        "positions": _ROWS["positions"],
        "slots": _ROWS["slots"],
    },
    rules=_store_rules,
)
compress = Op(
    "compress(Tensor state, Tensor table, Tensor positions, Tensor request, Tensor slots, Tensor norm_weight, "
    "Tensor cos_sin, Tensor(a!) cache, int ratio, bool overlap, float eps, int block_size, int format) -> ()",
    _compress,
    inputs=_STATE | _ROWS | _CACHE,
    rules=_compress_rules,
)
