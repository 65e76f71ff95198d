"""What a large step's leases need of a pool: ``python -m benchmarks.decode_step.placement``, on the simulated device.

The leases of `benchmarks.decode_step.peak` at true sizes in virtual memory, two steps: most bytes live at once, what is
reserved, and what is held in the end; as it is, and with every released block kept uncut for the same request, or none.
Writes ``benchmarks/results/cpu/placement.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

import workspace
from benchmarks.decode_step.model import ENGINE, flash
from dsv4.batch import batch_of
from dsv4.cache.caches import Caches
from dsv4.cache.groups import groups_of
from dsv4.model.context import Context
from dsv4.model.metadata import Metadata, metadata
from dsv4.model.precision import SERVED
from dsv4.model.reserve import reserve
from dsv4.model.scratch import stage_layouts
from dsv4.model.sizes import EXPERTS_AT_ONCE, dims_of_step
from dsv4.options import Options
from dsv4.plan import conditions_of
from dsv4.scheduler import Rows
from dsv4.shard import Shard
from dsv4.topology import EXIT, Acquire, Op, Release, layer
from workspace import pool, simulated
from workspace.sweep.report import provenance, write_json

MIB = 1 << 20
TOKENS = (4096, 7000, 7700, 8192)
RATIOS = (0, 4, 128, 4, 128, 0, 0)
RESULT = Path(__file__).parents[1] / "results" / "cpu" / "placement.json"


def measure(strategy: str, headroom: float, tokens: int, most: int = TOKENS[-1]) -> dict[str, Any]:
    """MiB of two steps of a prompt, on a pool reserved for so many tokens at most."""
    shard = Shard(attrs.evolve(flash(6), compress_ratios=RATIOS), attention="flashinfer")
    engine = attrs.evolve(ENGINE, max_num_batched_tokens=most)
    ws = workspace.create(strategy, device=simulated.Device(memory="virtual", log=False), headroom=headroom)
    with torch.no_grad():
        reserve(ws, shard, SERVED, engine, Options())
        reserved = ws.snapshot().reserved
        with ws.on(ws.stream("main")):
            live = max(_step(ws, shard, engine, tokens) for _ in range(2))
    held = ws.snapshot()
    return {
        "strategy": strategy, "headroom": headroom, "tokens": tokens, "live": live // MIB, "reserved": reserved // MIB,
        "held": held.reserved // MIB, "growths": held.growths,
    }  # fmt: skip


def _step(ws: Any, shard: Shard, engine: Any, tokens: int) -> int:
    """The leases of one step, without its work; most bytes that are live."""
    rows = (Rows(0, 0, tokens, True, True),)
    batch, meta = batch_of(rows, shard, engine), _metadata(rows, shard, engine)
    conditions = conditions_of(batch, shard, "none", True, tokens)
    leases: dict[str, Any] = {}
    most = 0
    for place, kind in enumerate(shard.config.layer_kinds):
        layouts, dims = stage_layouts(shard, SERVED, kind), dims_of_step(meta, batch, kind, engine, tokens)
        for node in layer(kind, conditions, place == 0):
            if isinstance(node, Acquire):
                layout = layouts[node.lease]
                leases[node.lease] = ws.acquire(layout, **{dim: dims[dim] for dim in layout.dim_names})
            elif isinstance(node, Release):
                leases.pop(node.lease).release()
            elif isinstance(node, Op) and node.label == "moe":
                with ws.lease(layouts["experts"], T=min(tokens, EXPERTS_AT_ONCE)) as inside:
                    most = max(most, inside.nbytes + sum(one.nbytes for one in leases.values()))
            most = max(most, sum(one.nbytes for one in leases.values()))
    with ws.lease(layouts["last"], T=tokens) as inside:
        most = max(most, inside.nbytes + sum(one.nbytes for one in leases.values()))
    for node in EXIT:
        if isinstance(node, Release):
            leases.pop(node.lease).release()
    return most


def _metadata(rows: tuple[Rows, ...], shard: Shard, engine: Any) -> Metadata:
    """Of a prompt's rows, in caches of no bytes."""
    blocks = {one.name: -(-rows[0].end // one.block_tokens) for one in groups_of(shard.config)}
    caches = Caches(shard.config, SERVED.storage, blocks, device="meta")
    context = Context([0] * rows[0].end, shard.config.vocab_size, rows[0].end)
    context.blocks_of(caches).extend(0, rows[0].end)
    return metadata(rows, {0: context}, caches, engine)


SHELVES = {"as it is": pool.UNCROWDED, "always": 0, "never": 1 << 40}
"""`workspace.pool.UNCROWDED` by when released blocks are kept uncut."""


@contextmanager
def shelves(when: str) -> Iterator[None]:
    """Keep released blocks uncut always, never, or as it is."""
    before, pool.UNCROWDED = pool.UNCROWDED, SHELVES[when]
    try:
        yield
    finally:
        pool.UNCROWDED = before


def main() -> None:
    """Measure, print, write."""
    found = []
    for tokens in TOKENS:
        for when in SHELVES:
            with shelves(when):
                found.append(measure("event_fenced", 1.0, tokens) | {"shelves": when})
        found.append(measure("per_stream", 1.0, tokens) | {"shelves": "as it is"})
    for one in found:
        print(one)
    write_json({"schema": 1, "made": provenance(), "about": __doc__, "mib": found}, RESULT)


if __name__ == "__main__":
    main()
