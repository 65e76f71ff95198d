"""Stages A to C of the attention block: projections of its input, norms, queries, compressors."""

from __future__ import annotations

from dsv4 import ops
from dsv4.cache.pages import Format
from dsv4.model.forward import Forward, Kernel
from dsv4.model.linear import linear, linear_wide
from dsv4.model.scratch import INDEXER_QUERY
from dsv4.model.weights import CompressorWeights
from dsv4.topology import Op


def query_input(f: Forward, _: Op) -> None:
    linear(f.mhc_attn.layer_in, f.weights.attention.wqa_wkv, out=f.inputs.qr_kv)


def compressor_input(f: Forward, _: Op) -> None:
    linear_wide(f.mhc_attn.layer_in, f.compressor.wkv_wgate, out=f.inputs.kv_score)


def weights_input(f: Forward, _: Op) -> None:
    linear(f.mhc_attn.layer_in, f.indexer.weights_proj, out=f.inputs.idx_w)


def indexer_input(f: Forward, _: Op) -> None:
    weight = f.indexer.compressor.wkv_wgate
    linear_wide(f.mhc_attn.layer_in, weight, out=f.inputs.idx_kv_score)


def latent_norms(f: Forward, _: Op) -> None:
    own, s = f.weights.attention, f.norms
    eps = f.config.rms_norm_eps
    ops.q_kv_rmsnorm(f.inputs.qr_kv, own.q_norm, own.kv_norm, eps, out=(s.qr, s.kv))


def query(f: Forward, _: Op) -> None:
    linear(f.norms.qr, f.weights.attention.wq_b, out=f.preparation.q.flatten(1))


def insert(f: Forward, _: Op) -> None:
    s, meta = f.preparation, f.meta
    ops.q_norm_rope_kv_insert(
        s.q,
        f.norms.kv,
        f.caches.window,
        meta.window_slots,
        meta.positions,
        f.table,
        f.config.rms_norm_eps,
        f.body.caches.window_pages.block_size,
        f.precision.keys,
        out=s.q_out,
    )


def indexer_query(f: Forward, _: Op) -> None:
    linear(f.norms.qr, f.indexer.wq_b, out=f.preparation.idx_q.flatten(1))


def quantise_indexer_query(f: Forward, _: Op) -> None:
    s, config = f.preparation, f.config
    scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    fp4 = f.precision.indexer is Format.INDEXER_FP4
    out = (s.iq, s.iq_scale, s.iq_weights) if fp4 else (s.iq, s.iq_weights)
    given = s.idx_q, f.inputs.idx_w, f.meta.positions, f.table, scale
    INDEXER_QUERY[f.precision.indexer](*given, out=out)


def compress_indexer(f: Forward, _: Op) -> None:
    _compress(f, f.indexer.compressor, f.inputs.idx_kv_score, f.caches.index_state, index=True)


def compress_c4(f: Forward, _: Op) -> None:
    _compress(f, f.compressor, f.inputs.kv_score, f.caches.state, index=False)


def _compress(f: Forward, own: CompressorWeights, kv_score: object, state: object, *, index: bool) -> None:
    """Save states, and compress the groups of 4 that are complete."""
    meta, kind, caches = f.meta, f.weights.kind, f.body.caches
    ops.save_partial_states(kv_score, own.ape, meta.positions, meta.state_slots[kind], state)
    pages = caches.index_pages if index else caches.compressed_pages(kind)
    ops.compress(
        state,
        meta.tables["c4_state"],
        meta.positions,
        meta.request,
        meta.compressed_slots[kind],
        own.norm,
        f.table,
        f.caches.index if index else f.caches.compressed,
        4,
        True,
        f.config.rms_norm_eps,
        pages.block_size,
        f.precision.indexer if index else f.precision.keys,
    )


def save_c128(f: Forward, _: Op) -> None:
    meta, kind = f.meta, f.weights.kind
    kv_score = f.inputs.kv_score
    ops.save_partial_states(kv_score, f.compressor.ape, meta.positions, meta.state_slots[kind], f.caches.state)


def pool_c128(f: Forward, _: Op) -> None:
    meta, slots = f.meta, f.meta.compressed_slots[f.weights.kind]
    given = f.caches.state, meta.tables["c128_state"], meta.positions, meta.request, slots
    ops.pool_states(*given, 128, False, out=f.preparation.compressed_kv)


def store_c128(f: Forward, _: Op) -> None:
    meta, kind = f.meta, f.weights.kind
    ops.store_compressed(
        f.preparation.compressed_kv,
        f.compressor.norm,
        f.table,
        meta.positions,
        meta.compressed_slots[kind],
        f.caches.compressed,
        128,
        f.config.rms_norm_eps,
        f.body.caches.compressed_pages(kind).block_size,
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
