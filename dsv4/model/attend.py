"""Stage D: the sparse indexer and attention, decode rows first, then prefill rows group by group."""

from __future__ import annotations

from typing import Any

import torch

from dsv4 import ops
from dsv4.cache.groups import COMPRESSED, SWA
from dsv4.cache.pages import Format
from dsv4.config import RATIO, LayerKind
from dsv4.model.forward import Forward, Kernel
from dsv4.model.gather import Gather
from dsv4.topology import Op


def chosen(f: Forward) -> torch.Tensor:
    """What this step's rows choose among their compressed keys, int32 [T, K]."""
    assert f.body.chosen is not None
    return f.body.chosen[: f.tokens]


def fill_chosen(f: Forward, _: Op) -> None:
    """Every candidate, where none has more than are chosen."""
    found = chosen(f)
    place = torch.arange(found.shape[1], dtype=torch.int32, device=found.device)
    found.copy_(torch.where(place < f.meta.candidates[:, None], place, -1))


def _scores(f: Forward, first: int, last: int, out: Any) -> None:
    """Logits of some rows over their requests' indexer keys."""
    s, rows = f.preparation, slice(first, last)
    fp4 = f.precision.indexer is Format.INDEXER_FP4
    ops.indexer_logits(
        s.iq[rows],
        s.iq_scale[rows] if fp4 else None,
        s.iq_weights[rows],
        f.caches.index,
        f.meta.tables[COMPRESSED],
        f.meta.request[rows],
        f.meta.candidates[rows],
        f.body.caches.index_pages.block_size,
        f.precision.indexer,
        out=out,
    )


def score_decode(f: Forward, _: Op) -> None:
    _scores(f, 0, f.decode, f.attention.logits_decode)


def choose_decode(f: Forward, _: Op) -> None:
    rows = slice(0, f.decode)
    ops.indexer_top_k(f.attention.logits_decode, f.meta.candidates[rows], out=chosen(f)[rows])


def choose_prefill(f: Forward, _: Op) -> None:
    """Score and choose, request by request, as many rows at a time as the leased logits hold."""
    room = f.attention.logits_prefill.flatten()
    for first, last, context in f.meta.prompts:
        width = context // 4
        step = max(1, len(room) // width) if width else last - first
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            count = rows.stop - start
            logits = room[: count * width].view(count, width)
            _scores(f, start, rows.stop, logits)
            ops.indexer_top_k(logits, f.meta.candidates[rows], out=chosen(f)[rows])


def place_chosen(f: Forward, _: Op) -> None:
    """Where the decode rows' chosen keys lie in the paged cache."""
    meta, s, rows = f.meta, f.attention, slice(0, f.decode)
    block = f.body.caches.compressed_pages(LayerKind.C4).block_size
    given = chosen(f)[rows], meta.request[rows], meta.tables[COMPRESSED], meta.valid[rows], block
    ops.global_top_k(*given, out=(s.global_indices, s.global_lens))


def clear_padding(f: Forward) -> None:
    """Rows that nobody attends for: what they hold reaches the experts, whose batches must not depend on it."""
    if f.meta.attended < f.tokens:
        f.output.o[f.meta.attended :].zero_()


def attend_decode(f: Forward, _: Op) -> None:
    clear_padding(f)
    meta, caches, kind = f.meta, f.body.caches, f.weights.kind
    extra: tuple[Any, Any, Any] = None, None, None
    if kind is LayerKind.C4:
        extra = f.caches.compressed, f.attention.global_indices, f.attention.global_lens
    elif kind is LayerKind.C128:
        extra = f.caches.compressed, meta.c128.slots, meta.c128.lens
    ops.sparse_attention_decode(
        f.preparation.q_out[: f.decode],
        f.caches.window,
        meta.window.slots,
        meta.window.lens,
        *extra,
        f.weights.attention.sink,
        f.config.head_dim**-0.5,
        f.config.qk_rope_head_dim,
        caches.window_pages.block_size,
        caches.compressed_pages(kind).block_size if extra[0] is not None else 1,
        f.precision.keys,
        out=f.output.o[: f.decode],
        scratch=f.attention.partial,
    )


def attend_prefill(f: Forward, _: Op) -> None:
    """Gather, combine and attend, one group of requests after the other in the same scratch."""
    if not f.decode:
        clear_padding(f)
    for group in f.meta.gathers[f.weights.kind]:
        keys = f.attention.kv_gather
        if f.caches.compressed is not None:
            block = f.body.caches.compressed_pages(f.weights.kind).block_size
            _gather(f, group, f.caches.compressed, COMPRESSED, block, keys)
        _gather(f, group, f.caches.window, SWA, f.body.caches.window_pages.block_size, keys)
        _attend_group(f, group)


def _gather(f: Forward, group: Gather, cache: torch.Tensor, name: str, block_size: int, keys: Any) -> None:
    window = name == SWA
    ops.gather_keys(
        cache,
        f.meta.tables[name],
        group.request,
        group.window_first if window else group.compressed_first,
        group.window_starts if window else group.compressed_starts,
        f.config.qk_rope_head_dim,
        block_size,
        f.precision.keys,
        out=keys,
    )


def _attend_group(f: Forward, group: Gather) -> None:
    kind, rows = f.weights.kind, slice(group.first_row, group.last_row)
    part = slice(rows.start - f.decode, rows.stop - f.decode)
    combined = f.attention.combined_idx[part], f.attention.combined_lens[part]
    ops.combine_indices(
        f.meta.positions[rows],
        group.group,
        group.compressed_starts[:-1],
        group.window_starts[:-1],
        group.window_first,
        chosen(f)[rows] if kind is LayerKind.C4 else None,
        RATIO[kind],
        f.config.sliding_window,
        out=combined,
    )
    scale = f.config.head_dim**-0.5
    given = f.preparation.q_out[rows], f.attention.kv_gather, *combined, f.weights.attention.sink, scale
    ops.sparse_attention_prefill(*given, out=f.output.o[rows])


def within_another(f: Forward, _: Op) -> None:
    """Runs inside the op that follows it on the same stream, once for each chunk or group."""


KERNELS: dict[str, Kernel] = {
    "fill_topk_indices": fill_chosen,
    "cp_gather_indexer_k": within_another,
    "mqa_logits": within_another,
    "topk_prefill": choose_prefill,
    "paged_mqa_logits": score_decode,
    "topk_decode": choose_decode,
    "global_topk": place_chosen,
    "flash_mla_decode": attend_decode,
    "dequantize_and_gather_k_cache": within_another,
    "combine_topk_swa": within_another,
    "flash_mla_sparse_fwd": attend_prefill,
}
