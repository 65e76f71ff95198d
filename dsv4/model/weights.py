"""Weights as the stages use them: fused projections, stacked experts, padded sinks, one rank's share of each.

Matrices that a product takes are [in, out]: views of the checkpoint's rows, transposed once and not at every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from dsv4.config import LayerKind
from dsv4.model.precision import Precision
from dsv4.shard import Shard

Tensors = Mapping[str, torch.Tensor]


@attrs.frozen(eq=False)
class HyperWeights:
    """Of the hyper-connection into a block, and of the block's RMSNorm."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor


@attrs.frozen(eq=False)
class CompressorWeights:
    """wkv and wgate as one projection [H, 2C]; ape [ratio, C]; norm [D]."""

    wkv_wgate: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor


@attrs.frozen(eq=False)
class IndexerWeights:
    """wq_b [Q, heads * D] and weights_proj [H, heads]."""

    wq_b: torch.Tensor
    weights_proj: torch.Tensor
    compressor: CompressorWeights


@attrs.frozen(eq=False)
class AttentionWeights:
    """wqa_wkv [H, Q+D], wq_b and wo_b; sink [P], -inf for padding heads; wo_a [G, N, R], for a batched product."""

    wqa_wkv: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    wq_b: torch.Tensor
    sink: torch.Tensor
    wo_a: torch.Tensor
    wo_b: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@attrs.frozen(eq=False)
class SharedExpert:
    """w13 [H, 2I], the gate's columns first, and w2 [I, H]."""

    w13: torch.Tensor
    w2: torch.Tensor


@attrs.frozen(eq=False)
class ExpertWeights:
    """The gate [H, E] with its bias or its token table; w13 [E, 2I, H] and w2 [E, H, I] of this rank's experts."""

    gate: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor | None
    w13: torch.Tensor
    w2: torch.Tensor
    shared: SharedExpert | None


@attrs.frozen(eq=False)
class LayerWeights:
    kind: LayerKind
    hc_attn: HyperWeights
    attention: AttentionWeights
    hc_ffn: HyperWeights
    experts: ExpertWeights


@attrs.frozen(eq=False)
class ModelWeights:
    """embed and lm_head [V, H]; `head` collapses the streams."""

    embed: torch.Tensor
    lm_head: torch.Tensor
    layers: tuple[LayerWeights, ...]
    head: HyperWeights


@attrs.frozen(eq=False)
class DraftWeights:
    """The MTP block; embedding and lm_head are the target's."""

    enorm: torch.Tensor
    hnorm: torch.Tensor
    e_proj: torch.Tensor
    h_proj: torch.Tensor
    layer: LayerWeights
    head: HyperWeights


class Assembly:
    """Makes a rank's weights from a whole checkpoint's tensors (see `dsv4.model.parameters` for their names).

    Tensors are asked for one by one, so a mapping that reads or makes them on demand is never in memory as a whole.

    Parameters
    ----------
    precision
        Matrices take the activations' dtype; what is fp32 in every checkpoint (hyper-connections, sinks, positional
        encodings, biases, norms) its wide one.
    device
        Where the weights go.
    """

    def __init__(
        self, shard: Shard, precision: Precision, tensors: Tensors, device: torch.device | str = "cpu"
    ) -> None:
        self.shard = shard
        self.config = shard.config
        self.precision = precision
        self.tensors = tensors
        self.device = torch.device(device)

    def model(self) -> ModelWeights:
        layers = tuple(self._layer(f"layers.{layer}.", kind) for layer, kind in enumerate(self.config.layer_kinds))
        embed = self._matrix("embed.weight")
        lm_head = embed if self.config.tie_word_embeddings else self._matrix("head.weight")
        return ModelWeights(embed, lm_head, layers, self._head(""))

    def draft(self, block: int = 0) -> DraftWeights:
        """MTP block number `block`."""
        prefix = f"mtp.{block}."
        return DraftWeights(
            self._wide(f"{prefix}enorm.weight"),
            self._wide(f"{prefix}hnorm.weight"),
            self._projection(f"{prefix}e_proj.weight"),
            self._projection(f"{prefix}h_proj.weight"),
            self._layer(prefix, LayerKind.SWA),
            self._head(prefix),
        )

    def _matrix(self, *names: str, split: int | None = None) -> torch.Tensor:
        """Rows of one or several matrices, one below the other; of each this rank's share along dim `split`."""
        parts = [self._tensor(name, self.precision.activations, split) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _projection(self, *names: str, split: int | None = None) -> torch.Tensor:
        """As `_matrix`, [in, out]."""
        return self._matrix(*names, split=split).T

    def _wide(self, name: str, split: int | None = None) -> torch.Tensor:
        return self._tensor(name, self.precision.wide, split)

    def _tensor(self, name: str, dtype: torch.dtype | None, split: int | None = None) -> torch.Tensor:
        found = self.tensors[name]
        if split is not None and self.shard.tensor_parallel > 1:
            # A copy: a view would keep every rank's share in memory.
            found = found.chunk(self.shard.tensor_parallel, split)[self.shard.rank].clone()
        return found.to(self.device, dtype)

    def _head(self, prefix: str) -> HyperWeights:
        return self._hyper(f"{prefix}hc_head", f"{prefix}norm.weight")

    def _hyper(self, prefix: str, norm: str) -> HyperWeights:
        fn, base, scale = (self._wide(f"{prefix}_{part}") for part in ("fn", "base", "scale"))
        return HyperWeights(fn, base, scale, self._wide(norm))

    def _layer(self, prefix: str, kind: LayerKind) -> LayerWeights:
        return LayerWeights(
            kind,
            self._hyper(f"{prefix}hc_attn", f"{prefix}attn_norm.weight"),
            self._attention(f"{prefix}attn.", kind),
            self._hyper(f"{prefix}hc_ffn", f"{prefix}ffn_norm.weight"),
            self._experts(f"{prefix}ffn."),
        )

    def _attention(self, prefix: str, kind: LayerKind) -> AttentionWeights:
        config, shard = self.config, self.shard
        sink = torch.full((shard.padded_heads,), float("-inf"), dtype=self.precision.wide, device=self.device)
        sink[: shard.heads] = self._wide(f"{prefix}attn_sink", split=0)
        grouped = self._matrix(f"{prefix}wo_a.weight", split=0).unflatten(0, (shard.groups, config.o_lora_rank))
        indexer = None
        if kind is LayerKind.C4:
            own = f"{prefix}indexer."
            indexer = IndexerWeights(
                self._projection(f"{own}wq_b.weight"),
                self._projection(f"{own}weights_proj.weight"),
                self._compressor(f"{own}compressor."),
            )
        return AttentionWeights(
            self._projection(f"{prefix}wq_a.weight", f"{prefix}wkv.weight"),
            self._wide(f"{prefix}q_norm.weight"),
            self._wide(f"{prefix}kv_norm.weight"),
            self._projection(f"{prefix}wq_b.weight", split=0),
            sink,
            grouped.transpose(1, 2),
            self._projection(f"{prefix}wo_b.weight", split=1),
            None if kind is LayerKind.SWA else self._compressor(f"{prefix}compressor."),
            indexer,
        )

    def _compressor(self, prefix: str) -> CompressorWeights:
        return CompressorWeights(
            self._projection(f"{prefix}wkv.weight", f"{prefix}wgate.weight"),
            self._wide(f"{prefix}ape"),
            self._wide(f"{prefix}norm.weight"),
        )

    def _experts(self, prefix: str) -> ExpertWeights:
        bias, table = f"{prefix}gate.bias", f"{prefix}gate.tid2eid"
        shared = None
        if self.config.n_shared_experts:
            own = f"{prefix}shared_experts"
            w13 = self._projection(f"{own}.w1.weight", f"{own}.w3.weight", split=0)
            shared = SharedExpert(w13, self._projection(f"{own}.w2.weight", split=1))
        return ExpertWeights(
            self._projection(f"{prefix}gate.weight"),
            self._wide(bias) if bias in self.tensors else None,
            self._tensor(table, None).contiguous() if table in self.tensors else None,
            *self._routed(f"{prefix}experts."),
            shared,
        )

    def _routed(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 and w2 of this rank's experts, each expert read into its place."""
        config, shard = self.config, self.shard
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        like: dict[str, Any] = {"dtype": self.precision.activations, "device": self.device}
        w13 = torch.empty(shard.experts, 2 * inner, hidden, **like)
        w2 = torch.empty(shard.experts, hidden, inner, **like)
        for place in range(shard.experts):
            own = f"{prefix}{shard.first_expert + place}"
            for part, out in (("w1", w13[place, :inner]), ("w3", w13[place, inner:]), ("w2", w2[place])):
                out.copy_(self.tensors[f"{own}.{part}.weight"])
        return w13, w2
