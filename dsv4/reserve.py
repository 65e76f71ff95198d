"""What a runner declares: every stage's layout at its largest, in the phases that live together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsv4.batch import bound
from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.layouts import stage_layouts
from dsv4.shard import Shard
from dsv4.topology import Acquire, Conditions, Node, Release, layer

CARRIED = ("mhc_ffn", "ffn")
"""Leases that the layer before has left behind."""


def declare(ws: Any, shard: Shard, engine: Engine, parts: int) -> None:
    """Declare eager steps of up to the engine's token budget, cut into `parts` micro-batches."""
    for kind in dict.fromkeys(shard.config.layer_kinds):
        dims = bound(kind, shard, engine)
        dims["T"] = dims["Tp"] = -(-dims["T"] // parts)
        dims["Td"] = min(dims["Td"], dims["T"])
        _declare(ws, shard, kind, "none", dims, None)


def declare_graphs(ws: Any, shard: Shard, engine: Engine, region: str, limit: int, lane: str) -> None:
    """Declare the graphs of one lane, of up to `limit` tokens."""
    for kind in dict.fromkeys(shard.config.layer_kinds):
        # Stage D is captured in a full graph only, whose rows are all decode rows.
        dims = {"T": limit, "Td": limit, "Tp": 0, "L": engine.max_model_len}
        dims |= {"index_rows": 0, "index_keys": 0, "gather_keys": 0}
        _declare(ws, shard, kind, region, dims, lane)


def _declare(ws: Any, shard: Shard, kind: LayerKind, region: str, dims: dict[str, int], lane: str | None) -> None:
    layouts = stage_layouts(shard, kind)
    nodes = layer(kind, Conditions(region=region), False)
    for phase, leases in enumerate(live_sets(nodes)):
        for name in leases:
            layout = layouts[name]
            own = {dim: value for dim, value in dims.items() if dim in layout.dim_names}
            ws.declare(layout, phase=f"{kind} {phase}", lane=lane, **own)


def live_sets(nodes: tuple[Node, ...]) -> Iterator[tuple[str, ...]]:
    """Leases held together, at each point where one more has begun; eager regions are not part of it."""
    held = list(CARRIED)
    for node in nodes:
        if isinstance(node, Acquire):
            held.append(node.lease)
            yield tuple(held)
        elif isinstance(node, Release):
            held.remove(node.lease)
