"""Sparse attention with a sink: K and V are the same vector, one for all heads.

p_s = exp(l_s - m) / (sum exp(l - m) + exp(sink_h - m)), l = q . k * scale; the sink has no value. Decode reads paged
caches by two lists of slots; prefill reads keys gathered and dequantised before (vLLM ``nvidia/flashmla.py``).
"""

from __future__ import annotations

import torch

from dsv4.cache.pages import Format, pages_of
from dsv4.ops.argument import ANY, F32, FLOAT, I32, U8, argument
from dsv4.ops.math import wide
from dsv4.ops.op import Op
from dsv4.ops.rules import Call, paged

GATHERED = 1 << 22
"""Elements of gathered keys that the reference holds at a time."""


DECODE_TILE = 64
"""Keys, and heads, that a block of the CUDA kernels takes at a time."""


def decode_splits(rows: int, heads: int, listed: int, multiprocessors: int) -> int:
    """Parts S of `sparse_attention_decode` for a device with so many multiprocessors; 0 where splitting gains nothing.

    For devices before sm_90. From there on blocks share a row and merge what they found by themselves, without scratch,
    when S is 0.

    Parameters
    ----------
    rows, heads
        T and P of the call.
    listed
        Keys of a row at most: W + K.
    """
    blocks = rows * -(-heads // DECODE_TILE)
    tiles = -(-listed // DECODE_TILE)
    splits = min(tiles, multiprocessors // max(1, blocks))
    return splits if splits > 1 else 0


def attend(
    q: torch.Tensor, keys: torch.Tensor, places: torch.Tensor, seen: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of some rows over keys [M, D] at places int64 [T, K], where seen bool [T, K]; [T, P, D].

    The last key is zero: what is not seen is read there, so that nothing foreign, not even a NaN, reaches a sum.
    """
    chosen = keys[places.masked_fill(~seen, len(keys) - 1)]
    scores = torch.bmm(q, chosen.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~seen[:, None], float("-inf"))
    sinks = sink.to(q.dtype).view(1, -1, 1).expand(len(q), -1, 1)
    weights = torch.cat((scores, sinks), 2).softmax(2)[..., :-1]
    # A padding head's sink is -inf: in a row without keys it has nothing to weigh.
    weights = weights.masked_fill(~seen[:, None], 0)
    return torch.bmm(weights, chosen)


def _sparse_attention_decode(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    window_lens: torch.Tensor,
    extra_cache: torch.Tensor | None,
    extra_slots: torch.Tensor | None,
    extra_lens: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
    rope: int,
    window_block_size: int,
    extra_block_size: int,
    format: int,
    o: torch.Tensor,
    partial: torch.Tensor,
) -> None:
    """Attention of decode rows over their window and, where a layer has one, a list of compressed states.

    Parameters
    ----------
    q
        [T, P, D].
    window_cache, extra_cache
        Caches of the window's keys and of compressed states (None in SWA-only layers), of one `Format`.
    window_slots, extra_slots
        int32 [T, W] and [T, K]; the first `lens` of each row count.
    window_lens, extra_lens
        int32 [T].
    sink
        [P], -inf for padding heads.
    scale, rope
        D**-0.5, and how many dims, the tail of D, are rotated.
    window_block_size, extra_block_size, format
        States of a page in each cache, and the `Format` of both.

    Returns
    -------
    o
        [T, P, D] like q; 0 where there is no key.

    Notes
    -----
    Scratch: partial float32 [T, S, P, D+2], the split-K parts a kernel for GPUs merges; S is the caller's. With S = 0
    the kernel needs none: from sm_90 on up to eight blocks of a cluster share a row when there are few rows, before it
    one block takes a row. Parts in scratch are float32; those that the blocks of a cluster send one another are rounded
    like o.
    """
    queries = wide(q)
    width = q.shape[2]
    lists = [(window_cache, window_slots, window_lens, window_block_size)]
    if extra_cache is not None and extra_slots is not None and extra_lens is not None:
        lists.insert(0, (extra_cache, extra_slots, extra_lens, extra_block_size))
    # Compressed states first: the order in which prefill sums them, too.
    listed = sum(slots.shape[1] for _, slots, _, _ in lists)
    for rows in torch.arange(len(q), device=q.device).split(max(1, GATHERED // (listed * width or 1))):
        keys, places, seen, start = [], [], [], 0
        for cache, slots, lens, block_size in lists:
            shown = torch.arange(slots.shape[1], device=q.device) < lens[rows, None]
            used, place = slots[rows].masked_fill(~shown, 0).unique(return_inverse=True)
            keys.append(pages_of(Format(format), width, rope, block_size, cache.dtype).read(cache, used, queries.dtype))
            places.append(place + start)
            seen.append(shown)
            start += len(used)
        gathered = torch.cat([*keys, queries.new_zeros(1, width)])
        o[rows] = attend(queries[rows], gathered, torch.cat(places, 1), torch.cat(seen, 1), sink, scale).to(o.dtype)


def _sparse_attention_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    o: torch.Tensor,
) -> None:
    """Attention of prefill rows over gathered keys.

    Parameters
    ----------
    q
        [T, P, D].
    keys
        [M, D], as `gather_keys` left them.
    indices, lens
        int32 [T, K] rows of keys, and int32 [T]: the first `lens` of each row count.
    sink
        [P], -inf for padding heads.
    scale
        D**-0.5.

    Returns
    -------
    o
        [T, P, D] like q; 0 where there is no key.
    """
    queries = wide(q)
    gathered = torch.cat((keys.to(queries.dtype), queries.new_zeros(1, q.shape[2])))
    listed, width = indices.shape[1], q.shape[2]
    for rows in torch.arange(len(q), device=q.device).split(max(1, GATHERED // (listed * width or 1))):
        seen = torch.arange(listed, device=q.device) < lens[rows, None]
        o[rows] = attend(queries[rows], gathered, indices[rows].long(), seen, sink, scale).to(o.dtype)


def _decode_rules(call: Call) -> None:
    given = [call[name] is not None for name in ("extra_cache", "extra_slots", "extra_lens")]
    call.require(
        all(given) or not any(given),
        "extra_cache",
        "comes without its slots and lens, or they without it",
        "pass all three or none",
    )
    for name in ("window", "extra") if all(given) else ("window",):
        paged(call, f"{name}_cache", f"{name}_block_size", call["q"].shape[2], call["rope"])


sparse_attention_decode = Op(
    "sparse_attention_decode(Tensor q, Tensor window_cache, Tensor window_slots, Tensor window_lens, "
    "Tensor? extra_cache, Tensor? extra_slots, Tensor? extra_lens, Tensor sink, float scale, int rope, "
    "int window_block_size, int extra_block_size, int format, Tensor(a!) o, Tensor(b!) partial) -> ()",
    _sparse_attention_decode,
    inputs={
        "q": argument("T", "P", "D"),
        "window_cache": argument(*ANY, dtype=(*FLOAT, U8)),
        "window_slots": argument("T", "W", dtype=I32),
        "window_lens": argument("T", dtype=I32),
        "extra_cache": argument(*ANY, dtype=(*FLOAT, U8), optional=True),
        "extra_slots": argument("T", "K", dtype=I32, optional=True),
        "extra_lens": argument("T", dtype=I32, optional=True),
        "sink": argument("P", dtype=FLOAT),
    },
    outs={"o": argument("T", "P", "D")},
    scratch={"partial": argument("T", "S", "P", "D+2", dtype=F32)},
    rules=_decode_rules,
)
sparse_attention_prefill = Op(
    "sparse_attention_prefill(Tensor q, Tensor keys, Tensor indices, Tensor lens, Tensor sink, float scale, "
    "Tensor(a!) o) -> ()",
    _sparse_attention_prefill,
    inputs={
        "q": argument("T", "P", "D"),
        "keys": argument("M", "D", dtype=FLOAT),
        "indices": argument("T", "K", dtype=I32),
        "lens": argument("T", dtype=I32),
        "sink": argument("P", dtype=FLOAT),
    },
    outs={"o": argument("T", "P", "D")},
)
