"""One batch made ready for one micro-batch: its leases, and the calls that replay each layer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import attrs

from dsv4.batch import Batch
from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.layouts import stage_layouts
from dsv4.shard import Shard
from dsv4.topology import MULTI_STREAM_TOKENS, Conditions

LEASES = (
    "mhc_attn", "inputs", "norms", "output", "preparation", "attention", "projection", "mhc_ffn", "ffn",
)  # fmt: skip
PLACE = {name: position for position, name in enumerate(LEASES, start=1)}
"""Where a lease stands in the lists below; place 0 is nobody's."""

Calls = tuple[Callable[[], object], ...]

Extents = dict[str, tuple[int, int]]
"""Offset and bytes of each tensor of a lease that has any."""

_SERIAL = count(1)


@attrs.frozen(eq=False)
class Stages:
    """The leases of one kind of layer; `serial` tells them apart where launches remember byte ranges."""

    kind: LayerKind
    leases: list[Any]
    extents: list[Extents]
    serial: int = attrs.field(factory=lambda: next(_SERIAL))


@attrs.frozen(eq=False)
class Plan:
    """A batch ready to run.

    Attributes
    ----------
    layers
        Stages and calls of each layer, in order; the calls after the last one. Empty where a graph has them.
    regions
        Calls of the eager region, by kind of layer.
    """

    stages: dict[LayerKind, Stages]
    layers: tuple[tuple[Stages, Calls], ...] = ()
    leave: Calls = ()
    regions: dict[LayerKind, Calls] = attrs.field(factory=dict)


def stages_of(
    ws: Any, shard: Shard, engine: Engine, batch: Batch, tokens: int, kinds: tuple[LayerKind, ...]
) -> dict[LayerKind, Stages]:
    """Leases for each kind of layer, entered and released once a layer.

    Layouts that the kinds have in common share a lease object, which is held from one layer to the next.

    Parameters
    ----------
    tokens
        Rows of the activations: the batch's, or those of the bucket it is padded to.
    """
    shared: dict[tuple[str, int], tuple[Any, Extents]] = {}
    found = {}
    for kind in dict.fromkeys(kinds):
        dims = dims_of(batch, kind, engine, tokens)
        stages = Stages(kind, [None], [{}])
        for name, layout in stage_layouts(shard, kind).items():
            made = shared.get((name, id(layout)))
            if made is None:
                own = {dim: value for dim, value in dims.items() if dim in layout.dim_names}
                extents = {one.name: (one.offset, one.nbytes) for one in layout.resolve(**own).extents if one.nbytes}
                made = shared[name, id(layout)] = (ws.lease(layout, **own), extents)
            stages.leases.append(made[0])
            stages.extents.append(made[1])
        found[kind] = stages
    return found


def dims_of(batch: Batch, kind: LayerKind, engine: Engine, tokens: int) -> dict[str, int]:
    """Values of the dims of `dsv4.layouts`."""
    return {
        "T": tokens,
        "Td": batch.decode,
        "Tp": batch.prefill,
        "L": engine.max_model_len,
        "index_rows": batch.index_rows,
        "index_keys": batch.index_keys,
        "gather_keys": batch.gather_keys[kind],
    }


def conditions_of(batch: Batch, shard: Shard, region: str, aux_streams: bool, tokens: int) -> Conditions:
    """What the topology depends on, for a batch padded to `tokens` rows."""
    return Conditions(
        region=region,
        aux_streams=aux_streams,
        parallel_inputs=tokens <= MULTI_STREAM_TOKENS,
        prefill=batch.prefill > 0,
        decode=batch.decode > 0,
        short_context=batch.short_context,
        boundary=batch.boundary,
        fp4=shard.indexer == "fp4",
    )
