"""Stage D: the sparse indexer and attention, decode rows first, then prefill rows group by group."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
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


def _scores(f: Forward, cut: Callable[[Any], Any], request: Any, candidates: Any, out: Any) -> None:
    """Logits of some rows, which `cut` takes from a tensor of all, over their requests' indexer keys."""
    s, layer, kept_as = f.preparation, f.layer, f.precision.indexer
    ops.indexer_logits(
        cut(s.iq),
        cut(s.iq_scale) if kept_as is Format.INDEXER_FP4 else None,
        cut(s.iq_weights),
        layer.caches.index,
        f.meta.tables[COMPRESSED],
        request,
        candidates,
        layer.index_block,
        kept_as,
        out=out,
    )


def score_decode(f: Forward, _: Op) -> None:
    rows = f.rows
    _scores(f, rows.of, rows.request, rows.candidates, f.attention.logits_decode)


def choose_decode(f: Forward, _: Op) -> None:
    ops.indexer_top_k(f.attention.logits_decode, f.rows.candidates, out=f.rows.chosen)


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
            candidates = f.meta.candidates[rows]
            _scores(f, itemgetter(rows), f.meta.request[rows], candidates, logits)
            ops.indexer_top_k(logits, candidates, out=chosen(f)[rows])


def place_chosen(f: Forward, _: Op) -> None:
    """Where the decode rows' chosen keys lie in the paged cache."""
    s, rows = f.attention, f.rows
    given = rows.chosen, rows.request, f.meta.tables[COMPRESSED], rows.valid, f.layer.compressed_block
    ops.global_top_k(*given, out=(s.global_indices, s.global_lens))


def clear_padding(f: Forward) -> None:
    """Rows that nobody attends for: what they hold reaches the experts, whose batches must not depend on it."""
    if f.meta.attended < f.tokens:
        f.output.o[f.meta.attended :].zero_()


def attend_decode(f: Forward, _: Op) -> None:
    clear_padding(f)
    meta, layer, rows, kind = f.meta, f.layer, f.rows, f.layer.kind
    s = f.attention
    extra: tuple[Any, Any, Any] = None, None, None
    if kind is LayerKind.C4:
        extra = layer.caches.compressed, s.global_indices, s.global_lens
    elif kind is LayerKind.C128:
        extra = layer.caches.compressed, meta.c128.slots, meta.c128.lens
    ops.sparse_attention_decode(
        rows.of(f.preparation.q_out),
        layer.caches.window,
        meta.window.slots,
        meta.window.lens,
        *extra,
        layer.attention.sink,
        layer.scale,
        f.config.qk_rope_head_dim,
        layer.window_block,
        layer.compressed_block,
        f.precision.keys,
        out=rows.of(f.output.o),
        scratch=s.partial,
    )


def attend_prefill(f: Forward, _: Op) -> None:
    """Gather, combine and attend, one group of requests after the other in the same scratch."""
    if not f.rows.count:
        clear_padding(f)
    layer = f.layer
    for group in f.meta.gathers[layer.kind]:
        keys = f.attention.kv_gather
        if layer.caches.compressed is not None:
            compressed = group.compressed_first, group.compressed_starts
            _gather(f, group, layer.caches.compressed, COMPRESSED, *compressed, layer.compressed_block, keys)
        window = group.window_first, group.window_starts
        _gather(f, group, layer.caches.window, SWA, *window, layer.window_block, keys)
        _attend_group(f, group)


def _gather(
    f: Forward, group: Gather, cache: torch.Tensor, name: str, first: Any, starts: Any, block_size: int, keys: Any
) -> None:
    ops.gather_keys(
        cache,
        f.meta.tables[name],
        group.request,
        first,
        starts,
        f.config.qk_rope_head_dim,
        block_size,
        f.precision.keys,
        out=keys,
    )


def _attend_group(f: Forward, group: Gather) -> None:
    layer, rows, decode = f.layer, slice(group.first_row, group.last_row), f.rows.count
    part = slice(rows.start - decode, rows.stop - decode)
    combined = f.attention.combined_idx[part], f.attention.combined_lens[part]
    ops.combine_indices(
        f.meta.positions[rows],
        group.group,
        group.compressed_starts[:-1],
        group.window_starts[:-1],
        group.window_first,
        chosen(f)[rows] if layer.kind is LayerKind.C4 else None,
        RATIO[layer.kind],
        f.config.sliding_window,
        out=combined,
    )
    given = f.preparation.q_out[rows], f.attention.kv_gather, *combined, layer.attention.sink, layer.scale
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
