"""The two published models of the family."""

from __future__ import annotations

from dsv4.config import ModelConfig

FLASH = ModelConfig(
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_lora_rank=1024,
    o_groups=8,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=6,
    vocab_size=129280,
    routed_scaling_factor=1.5,
)
"""DeepSeek-V4-Flash: 2 SWA-only, 21 C4 and 20 C128 layers, one MTP layer."""

PRO = ModelConfig(
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1536,
    o_lora_rank=1024,
    o_groups=16,
    sliding_window=128,
    compress_ratios=(128, 128, 4, *(128, 4) * 29, 0),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=1024,
    moe_intermediate_size=3072,
    n_routed_experts=384,
    num_experts_per_tok=6,
    vocab_size=129280,
    routed_scaling_factor=2.5,
)
"""DeepSeek-V4-Pro: 31 C128 and 30 C4 layers, one MTP layer."""

PRESETS = {"flash": FLASH, "pro": PRO}
