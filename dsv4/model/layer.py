"""A model as a forward pass goes through it: layers with all that no step changes, and what stands at the ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from dsv4.cache.caches import Caches, LayerCaches
from dsv4.config import LayerKind, ModelConfig
from dsv4.model.weights import AttentionWeights, ExpertWeights, HyperWeights, LayerWeights


@attrs.frozen(eq=False)
class Layer:
    """One layer's weights and caches, and the constants its ops take with them.

    Attributes
    ----------
    into_attention, into_ffn
        Weights and constants of the hyper-connection into either block, as the ops take them.
    compressor, indexer
        None where the kind has none.
    table
        RoPE table of the kind.
    window_block, compressed_block, index_block
        Positions of a page of the layer's caches; 1 where it has no such cache.
    scale, index_scale
        Of attention's scores and of the indexer's.
    """

    kind: LayerKind
    attention: AttentionWeights
    experts: ExpertWeights
    into_attention: tuple[Any, ...]
    into_ffn: tuple[Any, ...]
    compressor: Any
    indexer: Any
    caches: LayerCaches
    table: torch.Tensor
    window_block: int
    compressed_block: int
    index_block: int
    scale: float
    index_scale: float


def layers_of(
    weights: Sequence[LayerWeights], caches: Caches, tables: Mapping[LayerKind, torch.Tensor]
) -> tuple[Layer, ...]:
    """Layers of a model (or of its MTP block), with the caches and RoPE tables they use."""
    return tuple(
        _layer(own, cached, caches, tables[own.kind]) for own, cached in zip(weights, caches.layers, strict=True)
    )


def _layer(own: LayerWeights, cached: LayerCaches, caches: Caches, table: torch.Tensor) -> Layer:
    config, attention = caches.config, own.attention
    return Layer(
        kind=own.kind,
        attention=attention,
        experts=own.experts,
        into_attention=_mixing(own.hc_attn, config),
        into_ffn=_mixing(own.hc_ffn, config),
        compressor=attention.compressor,
        indexer=attention.indexer,
        caches=cached,
        table=table,
        window_block=caches.window_pages.block_size,
        compressed_block=caches.compressed_pages(own.kind).block_size if cached.compressed is not None else 1,
        index_block=caches.index_pages.block_size if cached.index is not None else 1,
        scale=config.head_dim**-0.5,
        index_scale=config.index_head_dim**-0.5 * config.index_n_heads**-0.5,
    )


def _mixing(own: HyperWeights, config: ModelConfig) -> tuple[Any, ...]:
    eps = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    return own.fn, own.base, own.scale, own.norm, *eps


@attrs.frozen(eq=False)
class Body:
    """What a micro-batch runs through: layers, and what stands at either end.

    Attributes
    ----------
    enter
        Given the pass, fills the first layer's streams, [T, S, H].
    head
        Collapses the last layer's.
    chosen
        int32 [Tmax, K], the compressed keys a C4 layer chooses; kept for the life of the workspace.
    """

    layers: tuple[Layer, ...]
    caches: Caches
    enter: Callable[[Any, Any], None]
    head: HyperWeights
    chosen: torch.Tensor | None
