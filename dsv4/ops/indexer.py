"""The sparse indexer: scores of compressed keys, the best k of them, and where those lie in the paged cache.

vLLM: ``fp8_fp4_paged_mqa_logits``, the persistent top-k, ``compute_global_topk_indices_and_lens``.
"""

from __future__ import annotations

import torch

from dsv4.cache.pages import Format, pages_of
from dsv4.cache.quantise import dequantise_fp4
from dsv4.ops.argument import ANY, BOOL, F32, FLOAT, FP8, I32, U8, argument
from dsv4.ops.errors import OpError
from dsv4.ops.math import wide
from dsv4.ops.op import Op
from dsv4.ops.rules import MOST_STATES, Call, paged

SCORES = 1 << 20
"""Elements of scores that the references hold at a time."""


def _candidates(op: str, counts: torch.Tensor, logits: torch.Tensor) -> int:
    """The most candidates of some rows; each has a logit."""
    most, width = max(0, int(counts.max())), logits.shape[1]
    if most > width:
        raise OpError(f"counts of {op} reach {most}, and logits have {width} columns", "pass at least as many")
    return most


def _indexer_logits(
    q: torch.Tensor,
    q_scales: torch.Tensor | None,
    weights: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    request: torch.Tensor,
    counts: torch.Tensor,
    block_size: int,
    format: int,
    logits: torch.Tensor,
) -> None:
    """logits[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[s]), -inf from the row's count of candidates on.

    Parameters
    ----------
    q
        [T, H, D] in a float dtype or FP8, or uint8 [T, H, D/2] with q_scales (E2M1).
    q_scales
        uint8 [T, H, D/32] for E2M1 queries, else None.
    weights
        [T, H], every scale folded in.
    cache
        Indexer keys; see `dsv4.cache.pages`.
    table
        int32 [R, B], blocks of each request's keys.
    request, counts
        int32 [T]: row of the table, and candidates s < count (the causal limit (position+1)//4).
    block_size, format
        Keys of a page, and a `Format`.

    Returns
    -------
    logits
        [T, S] in float32 or float64, S >= every count.
    """
    logits.fill_(float("-inf"))
    dtype = logits.dtype
    queries = wide(q).to(dtype) if q_scales is None else dequantise_fp4(q, q_scales, dtype)
    heads, width = queries.shape[1:]
    pages = pages_of(Format(format), width, 0, block_size, cache.dtype)
    for owner in request.unique().tolist():
        rows = (request == owner).nonzero().squeeze(1)
        most = _candidates("indexer_logits", counts[rows], logits)
        candidates = torch.arange(most, device=q.device)
        block = table[owner].long()[candidates // block_size]
        keys = pages.read(cache, block * block_size + candidates % block_size, dtype)
        for part in rows.split(max(1, SCORES // (heads * most or 1))):
            # A prompt's first rows see few of its keys: what none of the part sees is not multiplied.
            seen = _candidates("indexer_logits", counts[part], logits)
            scores = (queries[part].flatten(0, 1) @ keys[:seen].T).relu_().view(len(part), heads, seen)
            summed = torch.bmm(weights[part].to(dtype)[:, None], scores).squeeze(1)
            logits[part, :seen] = summed.masked_fill(candidates[:seen] >= counts[part, None], float("-inf"))


def _indexer_top_k(logits: torch.Tensor, counts: torch.Tensor, indices: torch.Tensor) -> None:
    """The K highest logits of each row among its candidates; ties go to the lower index.

    Parameters
    ----------
    logits
        [T, S].
    counts
        int32 [T], candidates of each row; logits behind them are not read.

    Returns
    -------
    indices
        int32 [T, K] in ascending order, filled with -1 behind the chosen ones.
    """
    indices.fill_(-1)
    step = max(1, SCORES // (logits.shape[1] or 1))
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        seen = _candidates("indexer_top_k", counts[rows], logits)
        most = min(seen, indices.shape[1])
        if not most:
            continue
        candidates = torch.arange(seen, device=logits.device) < counts[rows, None]
        shown = logits[rows, :seen].masked_fill(~candidates, float("-inf"))
        least = shown.topk(most, 1).values[:, -1:]
        above = shown > least
        # Of those that tie with the last one chosen, the first few; a candidate may score -inf itself.
        tied = (shown == least) & candidates
        left = most - above.sum(1, keepdim=True)
        chosen = above | (tied & (tied.cumsum(1) <= left))
        row, index = chosen.nonzero(as_tuple=True)
        indices[rows][row, chosen.cumsum(1)[row, index] - 1] = index.int()


def _global_top_k(
    indices: torch.Tensor,
    request: torch.Tensor,
    table: torch.Tensor,
    valid: torch.Tensor,
    block_size: int,
    slots: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Slots of chosen positions, and how many there are.

    Parameters
    ----------
    indices
        int32 [T, K], positions among a request's compressed keys, or -1.
    request
        int32 [T], row of the table.
    table
        int32 [R, B].
    valid
        bool [T]; padding rows are False.
    block_size
        Keys of a page.

    Returns
    -------
    slots, lens
        int32 [T, K]: table[request, i // block_size] * block_size + i % block_size, or -1; int32 [T], 0 for padding.
    """
    chosen = indices.clamp(min=0).long()
    block = table[request.long()[:, None], chosen // block_size]
    slots.copy_(torch.where(indices >= 0, block * block_size + chosen % block_size, -1))
    lens.copy_(((indices >= 0) & valid[:, None]).sum(1))


def _logits_rules(call: Call) -> None:
    q, scaled = call["q"], call["q_scales"] is not None
    call.require(scaled == (q.dtype is U8), "q_scales", "do not fit q", "pass them with E2M1 queries only")
    codes = q.shape[2]
    call.require(not scaled or codes % 16 == 0, "q", f"has {codes} bytes a head", "pass a multiple of 16")
    paged(call, "cache", "block_size", 2 * codes if scaled else codes, 0)


def _global_rules(call: Call) -> None:
    size = call["block_size"]
    call.require(0 < size < MOST_STATES, "block_size", f"is {size}", "pass the states of a page")


indexer_logits = Op(
    "indexer_logits(Tensor q, Tensor? q_scales, Tensor weights, Tensor cache, Tensor table, Tensor request, "
    "Tensor counts, int block_size, int format, Tensor(a!) logits) -> ()",
    _indexer_logits,
    inputs={
        "q": argument("T", "H", "E", dtype=(*FLOAT, FP8, U8)),
        "q_scales": argument("T", "H", "E//16", dtype=U8, optional=True),
        "weights": argument("T", "H"),
        "cache": argument(*ANY, dtype=(*FLOAT, U8)),
        "table": argument("R", "B", dtype=I32),
        "request": argument("T", dtype=I32),
        "counts": argument("T", dtype=I32),
    },
    outs={"logits": argument("T", "S")},
    rules=_logits_rules,
)
indexer_top_k = Op(
    "indexer_top_k(Tensor logits, Tensor counts, Tensor(a!) indices) -> ()",
    _indexer_top_k,
    inputs={"logits": argument("T", "S", dtype=(F32, torch.float64)), "counts": argument("T", dtype=I32)},
    outs={"indices": argument("T", "K", dtype=I32)},
)
global_top_k = Op(
    "global_top_k(Tensor indices, Tensor request, Tensor table, Tensor valid, int block_size, Tensor(a!) slots, "
    "Tensor(b!) lens) -> ()",
    _global_top_k,
    inputs={
        "indices": argument("T", "K", dtype=I32),
        "request": argument("T", dtype=I32),
        "table": argument("R", "B", dtype=I32),
        "valid": argument("T", dtype=BOOL),
    },
    outs={"slots": argument("T", "K", dtype=I32), "lens": argument("T", dtype=I32)},
    rules=_global_rules,
)
