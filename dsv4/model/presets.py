"""Small models for tests and sweeps: every kind of layer and every part of the published ones, at a size for a CPU."""

from __future__ import annotations

import attrs

from dsv4.config import ModelConfig, RopeScaling

MIXED = ModelConfig(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    head_dim=128,
    qk_rope_head_dim=64,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=4,
    sliding_window=128,
    compress_ratios=(0, 4, 128, 4, 0),
    index_n_heads=16,
    index_head_dim=128,
    index_topk=32,
    moe_intermediate_size=64,
    n_routed_experts=8,
    num_experts_per_tok=3,
    vocab_size=512,
    routed_scaling_factor=1.5,
    num_hash_layers=1,
    swiglu_limit=1.0,
    rope_scaling=RopeScaling(original_max_position_embeddings=65536),
    max_position_embeddings=4096,
)
"""An SWA, two C4 and a C128 layer. From 132 tokens on fewer compressed keys are chosen than there are (32); the clamp
of the experts acts on ordinary activations."""


def of_ratio(ratio: int, layers: int = 2) -> ModelConfig:
    """`MIXED` with layers of one kind only, and one behind them for the MTP block."""
    return attrs.evolve(MIXED, num_hidden_layers=layers, compress_ratios=(*(ratio,) * layers, 0))


TINY = attrs.evolve(
    MIXED,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=16,
    o_lora_rank=16,
    o_groups=2,
    sliding_window=32,
    compress_ratios=(0, 4, 128, 0),
    index_n_heads=4,
    index_head_dim=32,
    index_topk=8,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    vocab_size=64,
    hc_sinkhorn_iters=4,
)
"""A layer of each kind as small as they go, for runs whose order of execution matters and whose numbers are many."""
