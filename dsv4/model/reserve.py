"""What a decoder declares, so that its scratch is reserved once, before graphs and before the caches are sized."""

from __future__ import annotations

from typing import Any

from dsv4.batch import MAX_LOGITS_BYTES, bound
from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.model.precision import Precision
from dsv4.model.scratch import draft_entry, experts_layout, stage_layouts
from dsv4.reserve import live_sets
from dsv4.shard import Shard
from dsv4.topology import Conditions, layer

BESIDE_EXPERTS = ("mhc_ffn", "ffn")
"""Leases held while the MoE has its own."""


def declare(ws: Any, shard: Shard, precision: Precision, engine: Engine, *, draft: bool = False) -> None:
    """Declare eager steps of up to the engine's token budget; then `ws.reserve` holds the bytes.

    Parameters
    ----------
    draft
        Declare the MTP block, too, which runs between steps in the same bytes.
    """
    kinds = dict.fromkeys((*shard.config.layer_kinds, *((LayerKind.SWA,) if draft else ())))
    for kind in kinds:
        dims, layouts = dims_at_most(kind, shard, engine), stage_layouts(shard, precision, kind)
        layouts = layouts | {"experts": experts_layout(shard, precision), "entry": draft_entry(shard, precision)}
        held = [*live_sets(layer(kind, Conditions(), False)), (*BESIDE_EXPERTS, "experts")]
        if draft:
            held.append(("mhc_attn", "entry"))
        for phase, names in enumerate(held):
            for name in names:
                own = {dim: value for dim, value in dims.items() if dim in layouts[name].dim_names}
                ws.declare(layouts[name], phase=f"{kind} {phase}", **own)


def dims_at_most(kind: LayerKind, shard: Shard, engine: Engine) -> dict[str, int]:
    """Upper bounds of a layer's dims: those of `dsv4.batch.bound`, logits no larger than requests can make them."""
    dims = bound(kind, shard, engine)
    keys = min(dims["index_keys"], engine.max_num_seqs * (engine.max_model_len // 4))
    rows = min(dims["T"], -(-MAX_LOGITS_BYTES // 4 // keys)) if keys else 0
    return dims | {"index_keys": keys, "index_rows": rows}
