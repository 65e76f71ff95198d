"""Calls of every op that has a CUDA kernel, at the model's own widths, on a device: inputs, outs, scratch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.maker import BF16, F32, Call, Maker, made, pages
from dsv4 import ops
from dsv4.cache.pages import Format, States, pages_of
from dsv4.ops import Op

EPS = 1e-6

# -- queries, keys, norms ----------------------------------------------------------------------------------


def insert(
    m: Maker, rows: int, heads: int = 64, padded: int = 64, block: int = 64, layout: Format = Format.FP8_DS_MLA,
    inserted: int | None = None, stride: int = 0,
) -> Call:  # fmt: skip
    inserted = rows if inserted is None else inserted
    cache = pages(layout, 2 * rows + block, block, m.device, stride=stride)
    inputs = (
        m.noise(rows, heads, 512), m.noise(rows, 512), cache, m.slots(inserted, 2 * rows), m.positions(rows),
        m.cos_sin(), EPS, block, int(layout),
    )  # fmt: skip
    return made(ops.q_norm_rope_kv_insert, inputs, P=padded)


def q_kv_norm(m: Maker, rows: int, q: int = 1024, weights: torch.dtype = F32) -> Call:
    inputs = m.noise(rows, q + 512), m.plain(q, dtype=weights), m.plain(512, dtype=weights), EPS
    return made(ops.q_kv_rmsnorm, inputs)


def row_norm(m: Maker, rows: int, width: int = 4096) -> Call:
    return made(ops.rms_norm, (m.noise(rows, width), m.plain(width), EPS))


def indexer_q(m: Maker, rows: int, op: Op = ops.indexer_q_rope_fp8, heads: int = 64) -> Call:
    scale = 128**-0.5 * heads**-0.5
    return made(
        op, (m.noise(rows, heads, 128), m.plain(rows, heads, dtype=BF16), m.positions(rows), m.cos_sin(), scale)
    )


def inverse(
    m: Maker, rows: int, op: Op = ops.inverse_rope_fp8, heads: int = 64, padded: int = 64, groups: int = 8
) -> Call:
    inputs = m.noise(rows, padded, 512), m.positions(rows), m.cos_sin(), heads
    return made(op, inputs, G=groups, N=heads // groups * 512)


# -- compressors -------------------------------------------------------------------------------------------


def _requests(m: Maker, rows: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Positions and requests of rows that end groups of 4 and of 128; some begin at position 0."""
    positions, request, count = [], [], 0
    for start in range(0, rows, 64):
        own = min(64, rows - start)
        first = 0 if count % 3 == 2 else 128 * (1 + count % 2) - own
        positions.append(torch.arange(first, first + own))
        request.append(torch.full((own,), count, dtype=torch.int32))
        count += 1
    if not count:
        return torch.empty(0, dtype=torch.int64).to(m.device), torch.empty(0, dtype=torch.int32).to(m.device), 1
    return torch.cat(positions).to(m.device), torch.cat(request).to(m.device), count


def _state(m: Maker, requests: int, width: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States of 256 positions a request, and their table."""
    each = 256 // block
    held = States(width, block).allocate(1)
    state = torch.empty_strided(
        (requests * each, *held.shape[1:]), held.stride(), dtype=F32, device=m.device
    )  # fmt: skip
    state.copy_(m.plain(*state.shape))
    table = torch.randperm(requests * each, generator=m.generator, device=m.device).to(torch.int32).view(requests, each)
    return state, table


def save_states(m: Maker, rows: int, width: int = 2048, ratio: int = 4, block: int = 4) -> Call:
    positions, _, requests = _requests(m, rows)
    state, _ = _state(m, requests, width, block)
    slots = m.slots(rows, state.shape[0] * block)
    return made(
        ops.save_partial_states, (m.noise(rows, width, dtype=F32), m.plain(ratio, width // 2), positions, slots, state)
    )


def _ends(m: Maker, positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """A slot for each row that ends a group."""
    places = torch.randperm(len(positions) + 1, generator=m.generator, device=m.device)[: len(positions)]
    return places.masked_fill((positions + 1) % ratio != 0, -1)


def pooled(m: Maker, rows: int, width: int = 512, ratio: int = 128, overlap: bool = False, block: int = 8) -> Call:
    positions, request, requests = _requests(m, rows)
    state, table = _state(m, requests, width * (4 if overlap else 2), block)
    inputs = state, table, positions, request, _ends(m, positions, ratio), ratio, overlap
    return made(ops.pool_states, inputs, D=width)


def stored(
    m: Maker, rows: int, layout: Format = Format.FP8_DS_MLA, ratio: int = 128, block: int = 2, stride: int = 0,
    weights: torch.dtype = F32,
) -> Call:  # fmt: skip
    width = 512 if layout in (Format.FP8_DS_MLA, Format.PLAIN) else 128
    positions, _, _ = _requests(m, rows)
    cache = pages(layout, rows + block, block, m.device, width, stride)
    return made(ops.store_compressed, (
        m.noise(rows, width, dtype=F32), m.plain(width, dtype=weights), m.cos_sin(), positions,
        _ends(m, positions, ratio), cache, ratio, EPS, block, int(layout),
    ))  # fmt: skip


def compressed(m: Maker, rows: int, layout: Format = Format.FP8_DS_MLA, block: int = 64, stride: int = 0) -> Call:
    width = 512 if layout in (Format.FP8_DS_MLA, Format.PLAIN) else 128
    positions, request, requests = _requests(m, rows)
    state, table = _state(m, requests, 4 * width, 4)
    cache = pages(layout, rows + block, block, m.device, width, stride)
    return made(ops.compress, (
        state, table, positions, request, _ends(m, positions, 4), m.plain(width), m.cos_sin(), cache, 4, True, EPS,
        block, int(layout),
    ))  # fmt: skip


# -- the indexer -------------------------------------------------------------------------------------------


def filled(m: Maker, layout: Format, states: int, block: int, width: int = 512, stride: int = 0) -> torch.Tensor:
    """A cache with every state written."""
    own = pages_of(layout, width, 64, block, BF16)
    cache = pages(layout, states, block, m.device, width, stride)
    own.write(cache, torch.arange(states, device=m.device), m.plain(states, width))
    return cache


def _table(m: Maker, requests: int, each: int) -> torch.Tensor:
    found = torch.randperm(requests * each, generator=m.generator, device=m.device)
    return found.to(torch.int32).view(requests, each)


def _integers(m: Maker, top: int, rows: int) -> torch.Tensor:
    return torch.randint(top, (rows,), generator=m.generator, device=m.device, dtype=torch.int32)


def logits(
    m: Maker, rows: int, layout: Format = Format.INDEXER_FP8, heads: int = 64, keys: int = 1000, block: int = 64,
    stride: int = 0, requests: int = 4,
) -> Call:  # fmt: skip
    each = -(-keys // block)
    cache = filled(m, layout, requests * each * block, block, 128, stride)
    table, request = _table(m, requests, each), _integers(m, requests, rows)
    counts = _integers(m, keys + 1, rows)
    op = ops.indexer_q_rope_fp4 if layout is Format.INDEXER_FP4 else ops.indexer_q_rope_fp8
    q = indexer_q(m, max(1, rows), op, heads)
    made_q = q.run()
    scales = made_q[1][:rows] if layout is Format.INDEXER_FP4 else None
    inputs = made_q[0][:rows], scales, made_q[-1][:rows], cache, table, request, counts, block, int(layout)
    return made(ops.indexer_logits, inputs, S=keys)


def top_k(m: Maker, rows: int, k: int = 512, width: int = 3000) -> Call:
    """Scores with many ties, some of them -inf and -0."""
    scores = (m.noise(rows, width, dtype=F32) * 4).round() / 4
    scores.masked_fill_(m.plain(rows, width) > 2, float("-inf"))
    counts = _integers(m, width + 1, rows)
    return made(ops.indexer_top_k, (scores, counts), K=k)


def translated(m: Maker, rows: int, k: int = 512, block: int = 64) -> Call:
    indices = torch.randint(-1, 32 * block, (rows, k), generator=m.generator, device=m.device, dtype=torch.int32)
    valid = torch.arange(rows, device=m.device) % 7 != 3
    return made(ops.global_top_k, (indices, _integers(m, 5, rows), _table(m, 5, 32), valid, block))


# -- attention ---------------------------------------------------------------------------------------------


def gathered(m: Maker, rows: int, layout: Format = Format.FP8_DS_MLA, block: int = 64) -> Call:
    """Three requests' states; the last row is no request's."""
    each = -(-(rows + 8) // block)
    cache, table = filled(m, layout, 4 * each * block, block), _table(m, 4, each)
    starts = torch.tensor([0, rows // 3, rows // 2, max(0, rows - 1)], dtype=torch.int32, device=m.device)
    request = torch.tensor([2, 0, 3], dtype=torch.int32, device=m.device)
    first = torch.tensor([0, 5, 1], dtype=torch.int32, device=m.device)
    return made(ops.gather_keys, (cache, table, request, first, starts, 64, block, int(layout)), M=rows, D=512)


STATES = 4096
"""States of a cache that decode rows attend to."""


def _sink(m: Maker, padded: int) -> torch.Tensor:
    sink = m.plain(padded)
    sink[padded * 7 // 8 :] = float("-inf")
    return sink


def _listed(m: Maker, rows: int, width: int, top: int) -> torch.Tensor:
    return torch.randint(top, (rows, width), generator=m.generator, device=m.device, dtype=torch.int32)


def decode(
    m: Maker, rows: int, padded: int = 64, window: int = 128, extra: int = 512, splits: int = 0,
    layout: Format = Format.FP8_DS_MLA, full: bool = False, extra_block: int = 64, states: int = STATES,
) -> Call:  # fmt: skip
    """`full` lists have every place in use; with `states` enough of them, hardly a key is read twice."""
    cache = filled(m, layout, states, 64)
    lens = torch.full((rows,), window, dtype=torch.int32, device=m.device) if full else _integers(m, window + 1, rows)
    more: tuple[Any, Any, Any] = None, None, None
    if extra:
        count = (
            torch.full((rows,), extra, dtype=torch.int32, device=m.device) if full else _integers(m, extra + 1, rows)
        )
        more = filled(m, layout, states, extra_block), _listed(m, rows, extra, states), count
    inputs = (
        m.noise(rows, padded, 512), cache, _listed(m, rows, window, states), lens, *more, _sink(m, padded), 512**-0.5,
        64, 64, extra_block, int(layout),
    )  # fmt: skip
    return made(ops.sparse_attention_decode, inputs, S=splits)


def prefill(m: Maker, rows: int, padded: int = 64, listed: int = 640, keys: int = 2000, full: bool = False) -> Call:
    lens = torch.full((rows,), listed, dtype=torch.int32, device=m.device) if full else _integers(m, listed + 1, rows)
    inputs = (
        m.noise(rows, padded, 512), m.plain(keys, 512, dtype=BF16), _listed(m, rows, listed, keys), lens,
        _sink(m, padded), 512**-0.5,
    )  # fmt: skip
    return made(ops.sparse_attention_prefill, inputs)


# -- hyper-connections -------------------------------------------------------------------------------------


def _mixing(m: Maker, hidden: int) -> tuple[Any, ...]:
    fn = m.plain(24, 4 * hidden) / hidden**0.5
    return fn, m.plain(24), m.plain(3), m.plain(hidden), EPS, EPS, 20


def _streams(m: Maker, rows: int, hidden: int) -> tuple[Any, ...]:
    comb = m.plain(rows, 4, 4).softmax(2)
    return m.noise(rows, 4, hidden), 2 * m.plain(rows, 4).sigmoid(), comb, m.noise(rows, hidden)


def hyper_pre(m: Maker, rows: int, hidden: int = 4096) -> Call:
    return made(ops.mhc_pre, (m.noise(rows, 4, hidden), *_mixing(m, hidden)))


def hyper_post(m: Maker, rows: int, hidden: int = 4096) -> Call:
    return made(ops.mhc_post, _streams(m, rows, hidden))


def hyper_post_pre(m: Maker, rows: int, hidden: int = 4096) -> Call:
    return made(ops.mhc_post_pre, (*_streams(m, rows, hidden), *_mixing(m, hidden)))


def hyper_head(m: Maker, rows: int, hidden: int = 4096, weights: torch.dtype = F32) -> Call:
    fn = m.plain(4, 4 * hidden) / hidden**0.5
    mixing = fn, m.plain(4), m.plain(1), m.plain(hidden, dtype=weights), EPS, EPS
    return made(ops.hc_head, (m.noise(rows, 4, hidden), *mixing))


# -- experts -----------------------------------------------------------------------------------------------


def chosen(m: Maker, rows: int, experts: int = 256, k: int = 6, hashed: bool = False) -> Call:
    """Logits with many ties and none that are nearly so; or what a table says."""
    scores = (m.noise(rows, experts, dtype=F32) * 16).round() / 16
    tokens = torch.randint(64, (rows,), generator=m.generator, device=m.device)
    table = m.plain(64, experts).argsort(1)[:, :k].contiguous() if hashed else None
    return made(ops.route, (scores, None, table, tokens, 1.5), K=k)


def gate(m: Maker, rows: int, inner: int = 2048) -> Call:
    return made(ops.swiglu, (m.noise(rows, 2 * inner), 7.0))


CALLS: dict[str, Callable[..., Call]] = {
    "q_norm_rope_kv_insert": insert,
    "q_kv_rmsnorm": q_kv_norm,
    "rms_norm": row_norm,
    "indexer_q_rope": partial(indexer_q, op=ops.indexer_q_rope),
    "indexer_q_rope_fp8": partial(indexer_q, op=ops.indexer_q_rope_fp8),
    "indexer_q_rope_fp4": partial(indexer_q, op=ops.indexer_q_rope_fp4),
    "inverse_rope": partial(inverse, op=ops.inverse_rope),
    "inverse_rope_fp8": partial(inverse, op=ops.inverse_rope_fp8),
    "save_partial_states": save_states,
    "pool_states": pooled,
    "store_compressed": stored,
    "compress": compressed,
    "indexer_logits": logits,
    "indexer_top_k": top_k,
    "global_top_k": translated,
    "gather_keys": gathered,
    "sparse_attention_decode": decode,
    "sparse_attention_prefill": prefill,
    "mhc_pre": hyper_pre,
    "mhc_post": hyper_post,
    "mhc_post_pre": hyper_post_pre,
    "hc_head": hyper_head,
    "route": chosen,
    "swiglu": gate,
}
"""Of a maker and a number of rows, by op."""


def call(name: str, rows: int, data: str = "random", seed: int = 0, device: str = "cuda", **how: Any) -> Call:
    """A call of an op with random arguments."""
    return CALLS[name](Maker(device, seed, data), rows, **how)
