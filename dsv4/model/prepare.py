"""Stages A to C of the attention block: projections of its input, norms, queries, compressors."""

from __future__ import annotations

from typing import Any

from dsv4 import ops
from dsv4.cache.groups import C4_STATE, C128_STATE
from dsv4.cache.pages import Format
from dsv4.model.forward import Forward, Kernel
from dsv4.model.linear import linear, linear_wide
from dsv4.model.scratch import INDEXER_QUERY
from dsv4.model.weights import CompressorWeights
from dsv4.topology import Op


def query_input(f: Forward, _: Op) -> None:
    linear(f.mhc_attn.layer_in, f.layer.attention.wqa_wkv, out=f.inputs.qr_kv)


def compressor_input(f: Forward, _: Op) -> None:
    linear_wide(f.mhc_attn.layer_in, f.layer.compressor.wkv_wgate, out=f.inputs.kv_score)


def weights_input(f: Forward, _: Op) -> None:
    linear(f.mhc_attn.layer_in, f.layer.indexer.weights_proj, out=f.inputs.idx_w)


def indexer_input(f: Forward, _: Op) -> None:
    linear_wide(f.mhc_attn.layer_in, f.layer.indexer.compressor.wkv_wgate, out=f.inputs.idx_kv_score)


def latent_norms(f: Forward, _: Op) -> None:
    own, s = f.layer.attention, f.norms
    ops.q_kv_rmsnorm(f.inputs.qr_kv, own.q_norm, own.kv_norm, f.config.rms_norm_eps, out=(s.qr, s.kv))


def query(f: Forward, _: Op) -> None:
    linear(f.norms.qr, f.layer.attention.wq_b, out=f.preparation.q.flatten(1))


def insert(f: Forward, _: Op) -> None:
    s, meta, layer = f.preparation, f.meta, f.layer
    ops.q_norm_rope_kv_insert(
        s.q,
        f.norms.kv,
        layer.caches.window,
        meta.window_slots,
        meta.positions,
        layer.table,
        f.config.rms_norm_eps,
        layer.window_block,
        f.precision.keys,
        out=s.q_out,
    )


def indexer_query(f: Forward, _: Op) -> None:
    linear(f.norms.qr, f.layer.indexer.wq_b, out=f.preparation.idx_q.flatten(1))


def quantise_indexer_query(f: Forward, _: Op) -> None:
    s, layer, precision = f.preparation, f.layer, f.precision.indexer
    out = (s.iq, s.iq_scale, s.iq_weights) if precision is Format.INDEXER_FP4 else (s.iq, s.iq_weights)
    INDEXER_QUERY[precision](s.idx_q, f.inputs.idx_w, f.meta.positions, layer.table, layer.index_scale, out=out)


def compress_indexer(f: Forward, _: Op) -> None:
    layer, caches = f.layer, f.layer.caches
    cache = caches.index_state, caches.index, layer.index_block, f.precision.indexer
    _compress(f, layer.indexer.compressor, f.inputs.idx_kv_score, *cache)


def compress_c4(f: Forward, _: Op) -> None:
    layer, caches = f.layer, f.layer.caches
    cache = caches.state, caches.compressed, layer.compressed_block, f.precision.keys
    _compress(f, layer.compressor, f.inputs.kv_score, *cache)


def _compress(
    f: Forward, own: CompressorWeights, kv_score: Any, state: Any, cache: Any, block_size: int, kept_as: Format
) -> None:
    """Save states, and compress the groups of 4 that are complete."""
    meta, layer = f.meta, f.layer
    positions = meta.positions
    ops.save_partial_states(kv_score, own.ape, positions, meta.state_slots[layer.kind], state)
    ops.compress(
        state,
        meta.tables[C4_STATE],
        positions,
        meta.request,
        meta.compressed_slots[layer.kind],
        own.norm,
        layer.table,
        cache,
        4,
        True,
        f.config.rms_norm_eps,
        block_size,
        kept_as,
    )


def save_c128(f: Forward, _: Op) -> None:
    meta, layer = f.meta, f.layer
    slots = meta.state_slots[layer.kind]
    ops.save_partial_states(f.inputs.kv_score, layer.compressor.ape, meta.positions, slots, layer.caches.state)


def pool_c128(f: Forward, _: Op) -> None:
    meta, layer = f.meta, f.layer
    given = layer.caches.state, meta.tables[C128_STATE], meta.positions, meta.request
    ops.pool_states(*given, meta.compressed_slots[layer.kind], 128, False, out=f.preparation.compressed_kv)


def store_c128(f: Forward, _: Op) -> None:
    meta, layer = f.meta, f.layer
    ops.store_compressed(
        f.preparation.compressed_kv,
        layer.compressor.norm,
        layer.table,
        meta.positions,
        meta.compressed_slots[layer.kind],
        layer.caches.compressed,
        128,
        f.config.rms_norm_eps,
        layer.compressed_block,
        f.precision.keys,
    )


def quantised_elsewhere(f: Forward, _: Op) -> None:
    """Activations in FP8 belong to FP8 linears; those of this package take them as they are."""


KERNELS: dict[str, Kernel] = {
    "act_quant_x": quantised_elsewhere,
    "fused_wqa_wkv": query_input,
    "compressor_wkv_wgate": compressor_input,
    "indexer_weights_proj": weights_input,
    "indexer_wkv_wgate": indexer_input,
    "fused_q_kv_rmsnorm": latent_norms,
    "act_quant_qr": quantised_elsewhere,
    "wq_b": query,
    "fused_qnorm_rope_kv_insert": insert,
    "act_quant_qr_indexer": quantised_elsewhere,
    "indexer_wq_b": indexer_query,
    "fused_indexer_q_rope_quant": quantise_indexer_query,
    "indexer_save_states_and_compress": compress_indexer,
    "c4_save_states_and_compress": compress_c4,
    "c128_save_states": save_c128,
    "c128_compress": pool_c128,
    "c128_norm_rope_store": store_c128,
}
