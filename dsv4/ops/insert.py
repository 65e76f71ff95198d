"""Queries and keys made ready in one op: q norm, RoPE, head padding; KV RoPE, quantisation, paged insert.

vLLM: ``csrc/libtorch_stable/fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu``.
"""

from __future__ import annotations

import torch

from dsv4.cache.pages import Format, pages_of
from dsv4.ops.argument import ANY, FLOAT, I64, LIKE, U8, argument
from dsv4.ops.math import normed, rotated, wide
from dsv4.ops.op import Op
from dsv4.ops.rules import Call, paged, rotation


def _q_norm_rope_kv_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    eps: float,
    block_size: int,
    format: int,
    q_out: torch.Tensor,
) -> None:
    """Queries, normed per head without a weight and rotated; keys rotated, quantised and inserted.

    Every element of q_out is written. A slot of -1 inserts nothing; slots may be fewer than tokens (the rest is
    padding, whose queries are still made).

    Parameters
    ----------
    q
        [T, n, D], n local heads.
    kv
        [T, D], already normed.
    cache
        Mutated; see `dsv4.cache.pages` for its format.
    slots
        int64 [M], M <= T.
    positions
        int64 [T].
    cos_sin
        [*, R], the layer's RoPE table; R dims, the tail of D, are rotated.
    block_size, format
        States of a page, and a `Format`.

    Returns
    -------
    q_out
        [T, P, D], P >= n; heads from n on are zero.
    """
    heads, rows = q.shape[1], slots.shape[0]
    turns = cos_sin[positions]
    q_out[:, :heads] = rotated(normed(wide(q), eps), turns)
    q_out[:, heads:] = 0
    keys = rotated(wide(kv[:rows]), turns[:rows])
    pages_of(Format(format), kv.shape[1], cos_sin.shape[1], block_size, cache.dtype).write(cache, slots, keys)


def _rules(call: Call) -> None:
    (tokens, heads, width), inserted = call["q"].shape, call["slots"].shape[0]
    rotation(call, width)
    paged(call, "cache", "block_size", width, call["cos_sin"].shape[1])
    call.require(inserted <= tokens, "slots", "are more than tokens", "pass at most one a token")
    call.require(call["q_out"].shape[1] >= heads, "q_out", "has fewer heads than q", "pass at least as many")


q_norm_rope_kv_insert = Op(
    "q_norm_rope_kv_insert(Tensor q, Tensor kv, Tensor(a!) cache, Tensor slots, Tensor positions, Tensor cos_sin, "
    "float eps, int block_size, int format, Tensor(b!) q_out) -> ()",
    _q_norm_rope_kv_insert,
    inputs={
        "q": argument("T", "n", "D"),
        "kv": argument("T", "D", dtype=LIKE),
        "cache": argument(*ANY, dtype=(*FLOAT, U8)),
        "slots": argument("M", dtype=I64),
        "positions": argument("T", dtype=I64),
        "cos_sin": argument("L", "R", dtype=FLOAT),
    },
    outs={"q_out": argument("T", "P", "D")},
    rules=_rules,
)
