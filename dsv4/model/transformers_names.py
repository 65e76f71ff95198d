"""DeepSeek's tensor names and those of transformers' ``DeepseekV4ForCausalLM`` (5.17).

Transformers stacks the experts of a layer; it has no MTP block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from dsv4.config import ModelConfig

Tensors = dict[str, torch.Tensor]

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}

INSIDE = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{block}_{part}": f"{block}_hc.{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    **{
        f"attn.{owner}compressor.{name}": f"self_attn.compressor.{theirs}{other}"
        for owner, theirs in (("", ""), ("indexer.", "indexer."))
        for name, other in (
            ("wkv.weight", "kv_proj.weight"),
            ("wgate.weight", "gate_proj.weight"),
            ("norm.weight", "kv_norm.weight"),
            ("ape", "position_bias"),
        )
    },
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.w[123]\.weight")


def translated(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor but those of MTP blocks under transformers' name; of the stacked ones, one is made at a time."""
    for name in tensors:
        match = _LAYER.fullmatch(name)
        if match is None:
            if not name.startswith("mtp."):
                yield OUTSIDE[name], tensors[name]
        elif not _EXPERT.fullmatch(match[2]):
            yield f"model.layers.{match[1]}.{INSIDE[match[2]]}", tensors[name]
    for layer in range(config.num_hidden_layers):
        each = [f"layers.{layer}.ffn.experts.{expert}" for expert in range(config.n_routed_experts)]
        gate_up = (torch.cat([tensors[f"{one}.w1.weight"], tensors[f"{one}.w3.weight"]]) for one in each)
        yield f"model.layers.{layer}.{GATE_UP}", torch.stack(list(gate_up))
        yield f"model.layers.{layer}.{DOWN}", torch.stack([tensors[f"{one}.w2.weight"] for one in each])


def to_transformers(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> Tensors:
    """A state dict for transformers from tensors under DeepSeek's names; MTP blocks are left out."""
    return dict(translated(tensors, config))
