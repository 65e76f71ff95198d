"""What a decoder declares, so that its scratch is reserved once, before graphs and before the caches are sized."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.model.graph_metadata import persist_metadata
from dsv4.model.precision import Precision
from dsv4.model.scratch import draft_entry, stage_layouts
from dsv4.model.sizes import EXPERTS_AT_ONCE, dims_at_most
from dsv4.options import Options
from dsv4.reserve import live_sets
from dsv4.shard import Shard
from dsv4.stages import MAIN
from dsv4.topology import Conditions, layer

SPARE = 320 << 20
"""Bytes beyond those that live together, where all stages then fit side by side: steps of a few hundred tokens, whose
kernels are shorter than what it takes to cut a block anew."""

AT_THE_END = ("mhc_ffn", "ffn")
"""Leases held while the MoE has its own, and after the last layer."""


def reserve(
    ws: Any, shard: Shard, precision: Precision, engine: Engine, options: Options, *, draft: bool = False
) -> int:
    """Make what decoders keep, declare the scratch of a run and reserve it; the bytes the workspace then holds.

    Where the framework's allocator places each tensor, what was declared stands for what it will hold. Nothing else
    is kept later: a runner finds its persistent tensors here, metadata of graphs included.

    Parameters
    ----------
    draft
        With the MTP block.
    """
    sizes, kept = options.sizes(engine), 0
    for index in range(options.micro_batches):
        chosen = persist(ws, shard, engine, suffix_of(index))
        kept += chosen.nbytes if chosen is not None else 0
        if sizes:
            results = persist_results(ws, shard, precision, sizes[-1], suffix_of(index), draft)
            read = persist_metadata(ws, shard, precision, engine, options, suffix_of(index))
            kept += sum(one.nbytes for one in (*results, read) if one is not None)
    declare(ws, shard, precision, engine, draft=draft)
    for index in range(options.micro_batches if sizes else 0):
        declare_graphs(ws, shard, precision, engine, options.region, sizes[-1], lane_of(index))
    declared: int = ws.reserve(spare=SPARE)
    return kept + max(declared, ws.snapshot().reserved)


def suffix_of(index: int) -> str:
    """Tells streams and persistent tensors of micro-batches apart; the first one's have plain names."""
    return f".{index}" if index else ""


def lane_of(index: int) -> str:
    """The lane of a micro-batch's graphs."""
    return f"micro_batch.{index}"


def persist(ws: Any, shard: Shard, engine: Engine, suffix: str = "") -> torch.Tensor | None:
    """What a decoder with a C4 layer keeps for the life of the workspace, int32 [Tmax, K]: the keys it chose."""
    if LayerKind.C4 not in shard.config.layer_kinds:
        return None
    with ws.on(ws.stream(MAIN + suffix)):
        found: torch.Tensor = ws.persistent(
            "topk_indices" + suffix, (engine.max_num_batched_tokens, shard.config.index_topk), torch.int32
        )
    return found


def persist_results(
    ws: Any, shard: Shard, precision: Precision, limit: int, suffix: str, streams: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What graphs of up to `limit` tokens leave: streams [limit, S, H] if they are kept, hidden states [limit, H]."""
    config, made, residual = shard.config, precision.activations, None
    with ws.on(ws.stream(MAIN + suffix)):
        if streams:
            residual = ws.persistent(f"residual{suffix}", (limit, config.hc_mult, config.hidden_size), made)
        hidden = ws.persistent(f"hidden{suffix}", (limit, config.hidden_size), made)
    return residual, hidden


def declare(ws: Any, shard: Shard, precision: Precision, engine: Engine, *, draft: bool = False) -> None:
    """Declare eager steps of up to the engine's token budget; then `ws.reserve` holds the bytes.

    Parameters
    ----------
    draft
        Declare the MTP block, too, which runs between steps in the same bytes.
    """
    kinds = dict.fromkeys((*shard.config.layer_kinds, *((LayerKind.SWA,) if draft else ())))
    for kind in kinds:
        _declare(ws, shard, precision, kind, "none", dims_at_most(kind, shard, engine), None)
        if draft:
            for layout in (stage_layouts(shard, precision, kind)["mhc_attn"], draft_entry(shard, precision)):
                ws.declare(layout, phase=f"{kind} draft", T=engine.max_num_batched_tokens)


def declare_graphs(
    ws: Any, shard: Shard, precision: Precision, engine: Engine, region: str, limit: int, lane: str
) -> None:
    """Declare the graphs of one lane, of up to `limit` tokens."""
    for kind in dict.fromkeys(shard.config.layer_kinds):
        # Stage D is captured in a full graph only, whose rows are all decode rows.
        dims = {"T": limit, "Td": limit, "Tp": 0, "L": engine.max_model_len}
        dims |= {"index_rows": 0, "index_keys": 0, "gather_keys": 0}
        _declare(ws, shard, precision, kind, region, dims, lane)


def _declare(
    ws: Any, shard: Shard, precision: Precision, kind: LayerKind, region: str, dims: dict[str, int], lane: str | None
) -> None:
    layouts = stage_layouts(shard, precision, kind)
    inside = [(*AT_THE_END, name) for name in ("experts", "last")]
    held = [*live_sets(layer(kind, Conditions(region=region), False)), *inside]
    for phase, names in enumerate(held):
        for name in names:
            own = {dim: dims[dim] for dim in layouts[name].dim_names}
            if name == "experts":
                own["T"] = min(own["T"], EXPERTS_AT_ONCE)
            ws.declare(layouts[name], phase=f"{kind} {phase}", lane=lane, **own)
