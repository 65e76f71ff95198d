"""Every tensor of a checkpoint under DeepSeek's own names, with its shape."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4.config import RATIO, LayerKind, ModelConfig

Shapes = dict[str, tuple[int, ...]]

COLUMNS = {LayerKind.C4: 2, LayerKind.C128: 1}
"""Columns of a compressor per dim of what it makes (coff): C4 groups overlap."""

TOKEN_TABLE = "ffn.gate.tid2eid"
"""The one tensor of integers: a hash layer's experts of each token."""


def parameters(config: ModelConfig) -> Shapes:
    """Shapes by name: embedding, layers, head, and the MTP blocks behind them."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    found: Shapes = {"embed.weight": (vocabulary, hidden)} | _head("", config)
    if not config.tie_word_embeddings:
        found["head.weight"] = (vocabulary, hidden)
    for layer, kind in enumerate(config.layer_kinds):
        found |= block(f"layers.{layer}.", config, kind, layer < config.num_hash_layers)
    for draft in range(config.num_nextn_predict_layers):
        prefix = f"mtp.{draft}."
        found |= {f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
        found |= {f"{prefix}{name}.weight": (hidden, hidden) for name in ("e_proj", "h_proj")}
        found |= _head(prefix, config) | block(prefix, config, LayerKind.SWA, hashed=False)
    return found


def block(prefix: str, config: ModelConfig, kind: LayerKind, hashed: bool) -> Shapes:
    """One decoder layer; `hashed` ones route by a table of tokens instead of a bias."""
    found = dict(_block(config, kind, hashed))
    return {prefix + name: shape for name, shape in found.items()}


def _head(prefix: str, config: ModelConfig) -> Shapes:
    streams, hidden = config.hc_mult, config.hidden_size
    return {
        f"{prefix}norm.weight": (hidden,),
        f"{prefix}hc_head_fn": (streams, streams * hidden),
        f"{prefix}hc_head_base": (streams,),
        f"{prefix}hc_head_scale": (1,),
    }


def _block(config: ModelConfig, kind: LayerKind, hashed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, streams = config.hidden_size, config.hc_mult
    rows = (2 + streams) * streams
    for part in ("attn", "ffn"):
        yield f"{part}_norm.weight", (hidden,)
        yield f"hc_{part}_fn", (rows, streams * hidden)
        yield f"hc_{part}_base", (rows,)
        yield f"hc_{part}_scale", (3,)
    yield from _attention(config, kind)
    yield from _experts(config, hashed)


def _attention(config: ModelConfig, kind: LayerKind) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    wide = config.o_groups * config.o_lora_rank
    yield "attn.wq_a.weight", (config.q_lora_rank, hidden)
    yield "attn.wkv.weight", (width, hidden)
    yield "attn.wq_b.weight", (heads * width, config.q_lora_rank)
    yield "attn.wo_a.weight", (wide, heads * width // config.o_groups)
    yield "attn.wo_b.weight", (hidden, wide)
    yield "attn.q_norm.weight", (config.q_lora_rank,)
    yield "attn.kv_norm.weight", (width,)
    yield "attn.attn_sink", (heads,)
    if kind is not LayerKind.SWA:
        yield from _compressor("attn.compressor.", config, kind, width)
    if kind is LayerKind.C4:
        indexer = config.index_head_dim
        yield "attn.indexer.wq_b.weight", (config.index_n_heads * indexer, config.q_lora_rank)
        yield "attn.indexer.weights_proj.weight", (config.index_n_heads, hidden)
        yield from _compressor("attn.indexer.compressor.", config, kind, indexer)


def _compressor(prefix: str, config: ModelConfig, kind: LayerKind, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    columns = COLUMNS[kind] * width
    yield f"{prefix}wkv.weight", (columns, config.hidden_size)
    yield f"{prefix}wgate.weight", (columns, config.hidden_size)
    yield f"{prefix}norm.weight", (width,)
    yield f"{prefix}ape", (RATIO[kind], columns)


def _experts(config: ModelConfig, hashed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield "ffn.gate.weight", (config.n_routed_experts, hidden)
    if hashed:
        yield TOKEN_TABLE, (config.vocab_size, config.num_experts_per_tok)
    else:
        yield "ffn.gate.bias", (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from _mlp(f"ffn.experts.{expert}", hidden, inner)
    if config.n_shared_experts:
        yield from _mlp("ffn.shared_experts", hidden, inner * config.n_shared_experts)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.w1.weight", (inner, hidden)
    yield f"{prefix}.w2.weight", (hidden, inner)
    yield f"{prefix}.w3.weight", (inner, hidden)
