"""The bytes that a micro-batch's graphs read of a step: made once, before the caches are sized, at a stable address."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from dsv4.cache.caches import Caches
from dsv4.cache.groups import groups_of
from dsv4.engine import Engine
from dsv4.model.metadata import Padding, metadata
from dsv4.model.precision import Precision
from dsv4.model.upload import size
from dsv4.options import Options
from dsv4.shard import Shard
from dsv4.stages import MAIN

GATHERED_BYTES = 256
"""What the gathers of one prefill request take at most, beside 4 bytes a row: six short arrays."""


def padding_of(tokens: int, engine: Engine, options: Options) -> Padding:
    """The shape of the metadata of a graph of that size."""
    decode = tokens if options.mode == "full" else None
    return Padding(tokens, min(tokens, engine.max_num_seqs), engine.max_model_len, decode)


def persist_metadata(
    ws: Any, shard: Shard, precision: Precision, engine: Engine, options: Options, suffix: str = ""
) -> torch.Tensor:
    """Where the metadata of a micro-batch's graphs lies, uint8 [N]: enough for any step of the largest one's size."""
    limit = options.sizes(engine)[-1]
    padding = padding_of(limit, engine, options)
    most = attrs.evolve(padding, decode=min(limit, engine.max_num_seqs))
    # Metadata is cut by the caches' groups and kinds of layers, whatever they hold: a block of each, of no bytes.
    blocks = {group.name: 1 for group in groups_of(shard.config)}
    caches = Caches(shard.config, precision.storage, blocks, device="meta")
    nbytes = size(metadata((), {}, caches, engine, most))
    nbytes += len(set(caches.kinds)) * (4 * limit + GATHERED_BYTES * padding.requests)
    with ws.on(ws.stream(MAIN + suffix)):
        found: torch.Tensor = ws.persistent(f"metadata{suffix}", (-(-nbytes // 256) * 256,), torch.uint8)
    return found
