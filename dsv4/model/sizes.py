"""Values of the dims of `dsv4.model.scratch`: what a step's layers take, and the most that any step's can.

`dsv4.batch` counts as vLLM does, whose chunks of logits and groups of gathered keys are padded to their widest request.
Here logits are made request by request, and gathered keys lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4.batch import MAX_LOGITS_BYTES, Batch, bound
from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.model.gather import most_keys
from dsv4.model.metadata import Metadata
from dsv4.plan import dims_of
from dsv4.shard import Shard

EXPERTS_AT_ONCE = 2048
"""Tokens that go through the experts together: scratch of theirs is several times that of a token elsewhere."""


def dims_of_step(meta: Metadata, batch: Batch, kind: LayerKind, engine: Engine, tokens: int) -> dict[str, int]:
    """Of a layer of that kind, in a step padded to so many tokens."""
    keys = max((group.keys for group in meta.gathers[kind]), default=0)
    return dims_of(batch, kind, engine, tokens) | logits_of(meta.prompts) | {"gather_keys": keys}


def dims_at_most(kind: LayerKind, shard: Shard, engine: Engine) -> dict[str, int]:
    """For every step the engine may run."""
    whole = (0, engine.max_num_batched_tokens, engine.max_model_len)
    keys = most_keys(kind, shard.config, engine)
    return bound(kind, shard, engine) | logits_of((whole,)) | {"gather_keys": keys}


def logits_of(prompts: Sequence[tuple[int, int, int]]) -> dict[str, int]:
    """Room for the logits of any of the requests, or for as many of its rows as `MAX_LOGITS_BYTES` hold.

    Parameters
    ----------
    prompts
        As in `Metadata`.
    """
    limit = MAX_LOGITS_BYTES // 4
    keys = max((context // 4 for _, _, context in prompts), default=0)
    most = max((min((last - first) * (context // 4), limit) for first, last, context in prompts), default=0)
    return {"index_rows": -(-max(most, keys) // keys) if keys else 0, "index_keys": keys}
