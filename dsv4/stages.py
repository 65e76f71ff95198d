"""The ops of an attention block by stage: which stream runs what, and which temporaries it reads and writes.

Taken from vLLM 0.28 (``models/deepseek_v4/attention.py``, ``nvidia/flashmla.py``, ``compressor.py``). A
temporary is named ``lease.tensor``, after `dsv4.layouts.stage_layouts`; ``persistent.name`` is one of
`dsv4.layouts.persistent_tensors`. Weights and the paged caches are not scratch and do not appear.
"""

from __future__ import annotations

import attrs

from dsv4.config import LayerKind

MAIN, AUX0, AUX1, AUX2 = "main", "aux0", "aux1", "aux2"


@attrs.frozen
class Op:
    """One kernel, or a few that run back to back: what it is, where it runs, what it touches."""

    label: str
    stream: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def _op(label: str, stream: str, reads: str = "", writes: str = "") -> Op:
    return Op(label, stream, tuple(reads.split()), tuple(writes.split()))


def on(stream: str, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The same ops on another stream: what vLLM does when it does not fork."""
    return tuple(attrs.evolve(op, stream=stream) for op in ops)


# -- A: input projections (_run_parallel_input_projections) ----------------------------------------------
QUERY_INPUT = (
    _op("act_quant_x", MAIN, "mhc_attn.layer_in", "inputs.x_fp8 inputs.x_scale"),
    _op("fused_wqa_wkv", MAIN, "inputs.x_fp8 inputs.x_scale", "inputs.qr_kv"),
)
COMPRESSOR_INPUT = (_op("compressor_wkv_wgate", AUX0, "mhc_attn.layer_in", "inputs.kv_score"),)
WEIGHTS_INPUT = (_op("indexer_weights_proj", AUX1, "mhc_attn.layer_in", "inputs.idx_w"),)
INDEXER_INPUT = (_op("indexer_wkv_wgate", AUX2, "mhc_attn.layer_in", "inputs.idx_kv_score"),)

# -- B: norms --------------------------------------------------------------------------------------------
NORMS = (_op("fused_q_kv_rmsnorm", MAIN, "inputs.qr_kv", "norms.qr norms.kv"),)

# -- C: preparation --------------------------------------------------------------------------------------
QUERY = (
    _op("act_quant_qr", MAIN, "norms.qr", "preparation.qr_fp8 preparation.qr_scale"),
    _op("wq_b", MAIN, "preparation.qr_fp8 preparation.qr_scale", "preparation.q"),
    # kv is passed on and read for the cache insert of the same kernel.
    _op("fused_qnorm_rope_kv_insert", MAIN, "preparation.q norms.kv", "preparation.q_out"),
)


def indexer_query(fp4: bool) -> tuple[Op, ...]:
    """The indexer's queries, quantised."""
    quantised = "preparation.iq preparation.iq_weights" + (" preparation.iq_scale" if fp4 else "")
    return (
        _op("act_quant_qr_indexer", AUX0, "norms.qr", "preparation.idx_qr_fp8 preparation.idx_qr_scale"),
        _op("indexer_wq_b", AUX0, "preparation.idx_qr_fp8 preparation.idx_qr_scale", "preparation.idx_q"),
        _op("fused_indexer_q_rope_quant", AUX0, "preparation.idx_q inputs.idx_w", quantised),
    )


INDEXER_COMPRESSOR = (_op("indexer_save_states_and_compress", AUX2, "inputs.idx_kv_score"),)
"""Indexer keys: states and cache rows only, no scratch of their own."""

C4_COMPRESSOR = (_op("c4_save_states_and_compress", AUX1, "inputs.kv_score"),)
"""One fused kernel behind save_partial_states; no scratch of its own."""


def c128_compressor(boundary: bool) -> tuple[Op, ...]:
    """Without a request that crosses a boundary of 128 tokens only the states are saved."""
    save = _op("c128_save_states", AUX0, "inputs.kv_score")
    if not boundary:
        return (save,)
    return (
        save,
        _op("c128_compress", AUX0, "", "preparation.compressed_kv"),
        _op("c128_norm_rope_store", AUX0, "preparation.compressed_kv"),
    )


# -- D: sparse indexer and attention (_sparse_indexer_and_attn) ------------------------------------------
FILL_INDICES = (_op("fill_topk_indices", MAIN, "", "persistent.topk_indices"),)
"""Short contexts: every candidate is chosen, so no query is scored."""


def indexer(fp4: bool, prefill: bool, decode: bool) -> tuple[Op, ...]:
    """Score the compressed keys and choose the top k."""
    query = "preparation.iq preparation.iq_weights" + (" preparation.iq_scale" if fp4 else "")
    ops: list[Op] = []
    if prefill:
        gathered = "attention.k_quant attention.k_scale"
        ops += [
            _op("cp_gather_indexer_k", MAIN, "", gathered),
            _op("mqa_logits", MAIN, f"{query} {gathered}", "attention.logits_prefill"),
            _op("topk_prefill", MAIN, "attention.logits_prefill", "persistent.topk_indices"),
        ]
    if decode:
        ops += [
            _op("paged_mqa_logits", MAIN, query, "attention.logits_decode"),
            _op(
                "topk_decode",
                MAIN,
                "attention.logits_decode",
                "persistent.topk_indices attention.topk_workspace",
            ),
        ]
    return tuple(ops)


def attention(kind: LayerKind, prefill: bool, decode: bool) -> tuple[Op, ...]:
    """Decode rows, then prefill rows (forward_mqa); both write their own rows of the output in place."""
    ops: list[Op] = []
    if decode:
        chosen = {
            LayerKind.SWA: "",
            LayerKind.C4: " attention.global_indices attention.global_lens",
            LayerKind.C128: " persistent.decode_c128_indices",
        }[kind]
        if kind is LayerKind.C4:
            ops.append(_op("global_topk", MAIN, "persistent.topk_indices persistent.token_to_request", chosen))
        swa = "persistent.decode_swa_indices persistent.decode_swa_lens"
        ops.append(_op("flash_mla_decode", MAIN, f"preparation.q_out {swa}{chosen}", "output.o attention.lse"))
    if prefill:
        combined = "attention.combined_idx attention.combined_lens"
        source = (
            "persistent.prefill_swa_indices persistent.prefill_swa_lens"
            + {
                LayerKind.SWA: "",
                LayerKind.C4: " persistent.topk_indices",
                LayerKind.C128: " persistent.prefill_c128_indices",
            }[kind]
        )
        ops += [
            _op("dequantize_and_gather_k_cache", MAIN, "", "attention.kv_gather"),
            _op("combine_topk_swa", MAIN, source, combined),
            _op(
                "flash_mla_sparse_fwd",
                MAIN,
                f"preparation.q_out attention.kv_gather {combined}",
                "output.o attention.lse",
            ),
        ]
    return tuple(ops)


# -- E: output projection (_o_proj), and the hyper-connections around the block --------------------------
PROJECTION = (
    _op("fused_inv_rope_fp8_quant", MAIN, "output.o", "projection.o_fp8 projection.o_scale"),
    _op("fp8_einsum_wo_a", MAIN, "projection.o_fp8 projection.o_scale", "projection.z"),
    _op("act_quant_z", MAIN, "projection.z", "projection.z_fp8 projection.z_scale"),
    _op("wo_b", MAIN, "projection.z_fp8 projection.z_scale", "projection.attn_out"),
)


def _mhc(label: str, source: str, block: str, target: str) -> tuple[Op, ...]:
    streams = " ".join(f"{source}.{name}" for name in ("residual", "post", "comb")) if source else ""
    written = " ".join(f"{target}.{name}" for name in ("residual", "post", "comb", "layer_in")) if target else ""
    return (_op(label, MAIN, f"{streams} {block}", written),)


EMBED = _mhc("embed_mhc_pre", "", "", "mhc_attn")
POST_FFN = _mhc("mhc_fused_post_pre", "mhc_ffn", "ffn.y", "mhc_attn")
POST_ATTENTION = _mhc("mhc_fused_post_pre", "mhc_attn", "projection.attn_out", "mhc_ffn")
HEAD = _mhc("mhc_post_hc_head", "mhc_ffn", "ffn.y", "")

MOE = (_op("moe", MAIN, "mhc_ffn.layer_in", "ffn.y"),)
"""Gate, experts and shared expert as one op. Their scratch is not modelled: no source gives its sizes."""

METADATA = (
    _op(
        "build_metadata",
        MAIN,
        "",
        "persistent.decode_swa_indices persistent.prefill_swa_indices persistent.decode_swa_lens "
        "persistent.prefill_swa_lens persistent.decode_c128_indices persistent.prefill_c128_indices "
        "persistent.compressed_slots persistent.token_to_request",
    ),
)
"""Once per step, before the first layer; never captured."""
