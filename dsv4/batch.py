"""What the scratch of a step's layers depends on: row counts, contexts, the chunks of prefill."""

from __future__ import annotations

import attrs

from dsv4.config import RATIO, LayerKind
from dsv4.engine import Engine
from dsv4.scheduler import Rows, Step
from dsv4.shard import Shard

MAX_LOGITS_BYTES = 512 << 20
"""``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``: a chunk of prefill logits takes no more."""

GATHERED_CONTEXTS = 40
"""Contexts of full length whose indexer keys one chunk gathers (row 18: ``40*max_len/4`` keys)."""

GATHER_GROUP = 4
"""Requests of full length that one group of attention prefill gathers."""


@attrs.frozen
class Batch:
    """Rows of one micro-batch.

    Attributes
    ----------
    tokens, decode, prefill
        ``tokens = decode + prefill``.
    short_context
        No request has more candidates than the indexer picks (C4 layers then need no scores).
    boundary
        Some request fills a group of 128 tokens, so that the C128 compressor has work.
    index_rows, index_keys
        Rows and keys of the largest chunk of indexer logits.
    gather_keys
        Keys of the largest group of attention prefill, by layer kind.
    """

    tokens: int
    decode: int
    prefill: int
    short_context: bool
    boundary: bool
    index_rows: int
    index_keys: int
    gather_keys: dict[LayerKind, int] = attrs.field(hash=False)


def batch_of(rows: tuple[Rows, ...], shard: Shard, engine: Engine) -> Batch:
    """Sum up the rows of a micro-batch (all of a step's when there is one)."""
    prompts = [one for one in rows if one.prefill]
    prefill = sum(one.count for one in prompts)
    decode = len(rows) - len(prompts)
    index_rows, index_keys = index_chunk(prompts, engine)
    return Batch(
        tokens=decode + prefill,
        decode=decode,
        prefill=prefill,
        short_context=max(one.end for one in rows) // 4 <= shard.config.index_topk,
        boundary=any(one.start % 128 + one.count >= 128 for one in rows),
        index_rows=index_rows,
        index_keys=index_keys,
        gather_keys={kind: gather_group(prompts, kind, shard, engine) for kind in LayerKind},
    )


def index_chunk(prompts: list[Rows], engine: Engine) -> tuple[int, int]:
    """Rows and keys of the largest chunk of prefill logits in a C4 layer.

    Requests are taken in order while their keys fit the gather buffer and the logits their limit; a request
    whose own logits are too many is cut by rows.
    """
    limit = MAX_LOGITS_BYTES // 4
    capacity = GATHERED_CONTEXTS * engine.max_model_len // 4
    most_keys = most = rows = keys = 0
    for one in prompts:
        more = one.end // 4
        if keys + more > capacity or (rows + one.count) * (keys + more) > limit:
            rows = keys = 0
        rows, keys = rows + one.count, keys + more
        most_keys = max(most_keys, keys)
        most = max(most, min(rows * keys, limit))
    return (-(-most // most_keys) if most_keys else 0), most_keys


def gather_group(prompts: list[Rows], kind: LayerKind, shard: Shard, engine: Engine) -> int:
    """Keys that the largest group of prefill requests gathers for attention: requests x width of the widest.

    A request's width is its compressed keys and the sliding-window keys its rows see. Groups grow in order
    until requests x width would pass the buffer: 4 x (all compressed keys + window + token budget).
    """
    ratio, window = RATIO[kind], shard.config.sliding_window
    longest = -(-engine.max_model_len // ratio) if ratio else 0
    limit = GATHER_GROUP * (longest + window + engine.max_num_batched_tokens)
    most = count = width = 0
    for one in prompts:
        own = (-(-one.end // ratio) if ratio else 0) + min(one.start, window - 1) + one.count
        if (count + 1) * max(width, own) > limit:
            count = width = 0
        count, width = count + 1, max(width, own)
        most = max(most, count * width)
    return most


def split(step: Step) -> tuple[tuple[Rows, ...], ...]:
    """Two micro-batches of half the tokens each, a prompt's rows cut if need be; one for a single token."""
    if step.tokens < 2:
        return (step.rows,)
    left = step.tokens // 2
    first: list[Rows] = []
    second: list[Rows] = []
    for one in step.rows:
        taken = min(one.count, left)
        left -= taken
        if taken == one.count:
            first.append(one)
        elif taken == 0:
            second.append(one)
        else:
            first.append(attrs.evolve(one, count=taken, samples=False))
            second.append(attrs.evolve(one, start=one.start + taken, count=one.count - taken))
    return tuple(first), tuple(second)


def dummy(tokens: int, shard: Shard, engine: Engine) -> Batch:
    """The batch a graph is captured with: decode rows as far as requests go, a prompt for the rest.

    What a captured stage must not depend on is set to the case with most work.
    """
    decode = min(tokens, engine.max_num_seqs)
    rows = [Rows(index, 1, 1, False, True) for index in range(decode)]
    if tokens > decode:
        rows.append(Rows(decode, 0, tokens - decode, True, True))
    return attrs.evolve(batch_of(tuple(rows), shard, engine), short_context=False, boundary=True)


def decode_rows(batch: Batch) -> Batch:
    """The decode rows of a batch alone: what a draft model runs on."""
    none = dict.fromkeys(LayerKind, 0)
    return attrs.evolve(batch, tokens=batch.decode, prefill=0, index_rows=0, index_keys=0, gather_keys=none)


def bound(kind: LayerKind, shard: Shard, engine: Engine) -> dict[str, int]:
    """Upper bounds of a layer's dims for every step the engine may run."""
    capacity = GATHERED_CONTEXTS * engine.max_model_len // 4
    window, ratio = shard.config.sliding_window, RATIO[kind]
    longest = -(-engine.max_model_len // ratio) if ratio else 0
    return {
        "T": engine.max_num_batched_tokens,
        "Td": engine.max_num_seqs,
        "Tp": engine.max_num_batched_tokens,
        "L": engine.max_model_len,
        "index_rows": -(-MAX_LOGITS_BYTES // 4 // capacity),
        "index_keys": capacity,
        "gather_keys": GATHER_GROUP * (longest + window + engine.max_num_batched_tokens),
    }
