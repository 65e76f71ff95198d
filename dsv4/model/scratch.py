"""The scratch of a layer that really computes, by stage: leases of `dsv4.topology`, built from the ops' layouts.

`dsv4.layouts` has the same stages as vLLM's FP8 kernels see them; here are the tensors that the ops of this package
write, in the run's own precision.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from dsv4 import ops
from dsv4.cache.pages import Format
from dsv4.config import LayerKind
from dsv4.model.precision import Precision
from dsv4.shard import Shard
from workspace import Layout, TensorSpec, spec

SPLITS = 0
"""Split-K parts of decode attention: the reference kernel needs none."""

Specs = dict[str, TensorSpec]

INDEXER_QUERY = {
    Format.PLAIN: ops.indexer_q_rope,
    Format.INDEXER_FP8: ops.indexer_q_rope_fp8,
    Format.INDEXER_FP4: ops.indexer_q_rope_fp4,
}


def _layout(name: str, specs: Specs) -> Layout:
    given: dict[str, Any] = dict(specs)
    return Layout(name, **given)


@lru_cache(maxsize=256)
def stage_layouts(shard: Shard, precision: Precision, kind: LayerKind) -> dict[str, Layout]:
    """Layouts of a layer's leases by their names in the topology; dims as in `dsv4.layouts`.

    Beside them ``experts``, which the MoE leases for itself, and ``last``, the streams that nobody keeps.
    """
    return {
        "mhc_attn": _hyper_connection(shard, precision, "attention"),
        "inputs": _inputs(shard, precision, kind),
        "norms": _norms(shard, precision),
        "output": _output(shard, precision),
        "preparation": _preparation(shard, precision, kind),
        "attention": _attention(shard, precision, kind),
        "projection": _projection(shard, precision),
        "mhc_ffn": _hyper_connection(shard, precision, "ffn"),
        "ffn": _ffn(shard, precision),
        "experts": experts_layout(shard, precision),
        "last": _last(shard, precision),
    }


@lru_cache(maxsize=256)
def _hyper_connection(shard: Shard, precision: Precision, block: str) -> Layout:
    config = shard.config
    own = ops.mhc_pre.specs(precision.activations, S=config.hc_mult, H=config.hidden_size)
    residual = spec("T", config.hc_mult, config.hidden_size, dtype=precision.activations)
    return _layout(f"hyper_connection_{block}", {"residual": residual, **own})


def _inputs(shard: Shard, precision: Precision, kind: LayerKind) -> Layout:
    config, like = shard.config, precision.activations
    specs = {"qr_kv": spec("T", config.q_lora_rank + config.head_dim, dtype=like)}
    if kind is not LayerKind.SWA:
        specs["kv_score"] = spec("T", config.head_dim * (4 if kind is LayerKind.C4 else 2), dtype=precision.wide)
    if kind is LayerKind.C4:
        specs["idx_w"] = spec("T", config.index_n_heads, dtype=like)
        specs["idx_kv_score"] = spec("T", 4 * config.index_head_dim, dtype=precision.wide)
    return _layout("input_projections", specs)


@lru_cache(maxsize=256)
def _norms(shard: Shard, precision: Precision) -> Layout:
    config = shard.config
    return _layout("norms", ops.q_kv_rmsnorm.specs(precision.activations, Q=config.q_lora_rank, D=config.head_dim))


@lru_cache(maxsize=256)
def _output(shard: Shard, precision: Precision) -> Layout:
    shape = {"P": shard.padded_heads, "D": shard.config.head_dim}
    return _layout("attention_output", ops.sparse_attention_prefill.specs(precision.activations, **shape))


def _preparation(shard: Shard, precision: Precision, kind: LayerKind) -> Layout:
    config, like = shard.config, precision.activations
    specs = {"q": spec("T", shard.heads, config.head_dim, dtype=like)}
    specs |= ops.q_norm_rope_kv_insert.specs(like, P=shard.padded_heads, D=config.head_dim)
    if kind is LayerKind.C4:
        heads, width = config.index_n_heads, config.index_head_dim
        specs["idx_q"] = spec("T", heads, width, dtype=like)
        made = INDEXER_QUERY[precision.indexer].specs(like, H=heads, D=width)
        specs |= {INDEXER_NAMES[name]: one for name, one in made.items()}
    if kind is LayerKind.C128:
        specs["compressed_kv"] = ops.pool_states.specs(like, D=config.head_dim)["pooled"]
    return _layout("preparation", specs)


INDEXER_NAMES = {"q_out": "iq", "scales_out": "iq_scale", "weights_out": "iq_weights"}
"""What the topology calls the outs of the indexer's query op."""


def _attention(shard: Shard, precision: Precision, kind: LayerKind) -> Layout:
    config, window = shard.config, shard.config.sliding_window
    listed: dict[LayerKind, int | str] = {
        LayerKind.SWA: window,
        LayerKind.C4: config.index_topk + window,
        LayerKind.C128: f"(L+127)//128+{window}",
    }
    combined = ops.combine_indices.specs(T="Tp", K=listed[kind])
    decode = ops.sparse_attention_decode.specs(
        precision.activations, T="Td", S=SPLITS, P=shard.padded_heads, D=config.head_dim
    )
    specs = {
        "kv_gather": spec("gather_keys", config.head_dim, dtype=precision.activations),
        "combined_idx": combined["indices"],
        "combined_lens": combined["lens"],
        "partial": decode["partial"],
    }
    if kind is LayerKind.C4:
        chosen = ops.global_top_k.specs(T="Td", K=config.index_topk)
        specs |= {
            "logits_prefill": spec("index_rows", "index_keys", dtype=precision.wide),
            "logits_decode": spec("Td", "L//4", dtype=precision.wide),
            "global_indices": chosen["slots"],
            "global_lens": chosen["lens"],
        }
    return _layout("attention", specs)


@lru_cache(maxsize=256)
def _projection(shard: Shard, precision: Precision) -> Layout:
    config, like = shard.config, precision.activations
    specs = {"o_grouped": ops.inverse_rope.specs(like, G=shard.groups, N=shard.group_width)["grouped"]}
    specs["z"] = spec("T", shard.groups, config.o_lora_rank, dtype=like)
    specs["attn_out"] = spec("T", config.hidden_size, dtype=like)
    return _layout("output_projection", specs)


@lru_cache(maxsize=256)
def _ffn(shard: Shard, precision: Precision) -> Layout:
    return _layout("ffn_output", {"y": spec("T", shard.config.hidden_size, dtype=precision.activations)})


@lru_cache(maxsize=256)
def _last(shard: Shard, precision: Precision) -> Layout:
    config = shard.config
    return _layout(
        "last_streams", {"mixed": spec("T", config.hc_mult, config.hidden_size, dtype=precision.activations)}
    )


@lru_cache(maxsize=256)
def experts_layout(shard: Shard, precision: Precision) -> Layout:
    """Inside the MoE: gate logits, the chosen experts, the shared expert's and the routed experts' rows."""
    config, like = shard.config, precision.activations
    chosen = ops.route.specs(like, K=config.num_experts_per_tok)
    routed = ops.routed_experts.specs(
        like, K=config.num_experts_per_tok, H=config.hidden_size, I=config.moe_intermediate_size
    )
    inner = shard.shared_inner
    specs = {"logits": spec("T", config.n_routed_experts, dtype=precision.wide), **chosen}
    specs["shared_gate_up"] = spec("T", 2 * inner, dtype=like)
    specs["shared_act"] = spec("T", inner, dtype=like)
    del routed["y"]
    return _layout("experts", specs | routed)


@lru_cache(maxsize=256)
def draft_entry(shard: Shard, precision: Precision) -> Layout:
    """What enters the MTP block: normed streams and embedding, and their projections."""
    streams, hidden = shard.config.hc_mult, shard.config.hidden_size
    like: torch.dtype = precision.activations
    return _layout(
        "draft_entry",
        {
            "streams": spec("T", streams, hidden, dtype=like),
            "embedded": spec("T", hidden, dtype=like),
            "normed": spec("T", hidden, dtype=like),
            "projected": spec("T", hidden, dtype=like),
        },
    )
