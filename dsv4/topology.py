"""Streams, forks and joins of a decoder layer (vLLM 0.28) as nodes that a runner walks in host order.

One main and three aux streams. A fork makes the branches wait for the parent; the join makes the parent wait
for the branches. Decisions are those of vLLM:

- stage A forks only up to `MULTI_STREAM_TOKENS` tokens; stage C forks at any size;
- C4: indexer on aux0, compressor on aux1, and inside aux0's branch the indexer's compressor on aux2;
- C128: the compressor on aux0;
- ``execute_in_parallel`` enqueues the branches first, ``maybe_execute_in_parallel`` (C128's compressor, the
  inner fork) the parent's work first and does not fork at all while a breakable graph is being captured: in a
  narrow region both are serial, the three-way fork of a C4 layer is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import attrs

from dsv4 import stages
from dsv4.config import LayerKind
from dsv4.stages import AUX0, AUX1, AUX2, MAIN, Op, on

MULTI_STREAM_TOKENS = 1024
"""``VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD``: above it stage A runs on the main stream alone."""

AUX_STREAMS = (AUX0, AUX1, AUX2)


@attrs.frozen
class Acquire:
    """Begin a lease of the layout of that name."""

    lease: str


@attrs.frozen
class Release:
    """End it."""

    lease: str


@attrs.frozen
class Branch:
    """Work of one branch of a fork."""

    stream: str
    nodes: tuple[Node, ...]


@attrs.frozen
class Fork:
    """Branches beside work of the parent stream, joined at the end."""

    parent: str
    branches: tuple[Branch, ...]
    body: tuple[Node, ...]
    branches_first: bool


@attrs.frozen
class Break:
    """An eager region: it ends a graph's segment, and runs again at each replay."""

    nodes: tuple[Node, ...]


Node = Op | Acquire | Release | Fork | Break


@attrs.frozen
class Conditions:
    """What of a step, a shard and a run the topology depends on.

    Attributes
    ----------
    region
        ``"none"``: no break (eager, or one full graph); ``"wide"``: stages C and D break out of the graph;
        ``"narrow"``: stage D does.
    aux_streams
        Whether there are aux streams at all.
    parallel_inputs
        Whether the step is small enough for stage A to fork.
    prefill, decode
        Whether the step has rows of that kind.
    short_context
        No request has more candidates than the indexer picks, so its queries are skipped. No effect where
        stage C is captured (#52492).
    boundary
        A request crosses a boundary of 128 tokens. Taken as true where stage C is captured: a graph
        must not depend on the step's lengths.
    fp4
        Format of the indexer's queries.
    """

    region: str = "none"
    aux_streams: bool = True
    parallel_inputs: bool = True
    prefill: bool = True
    decode: bool = True
    short_context: bool = False
    boundary: bool = True
    fp4: bool = False


def _fork(
    parent: str, branches: list[tuple[str, tuple[Node, ...]]], body: tuple[Node, ...], first: bool
) -> tuple[Node, ...]:
    return (Fork(parent, tuple(Branch(stream, nodes) for stream, nodes in branches), body, first),)


def stage_a(kind: LayerKind, conditions: Conditions) -> tuple[Node, ...]:
    """Input projections."""
    side = []
    if kind is not LayerKind.SWA:
        side.append((AUX0, stages.COMPRESSOR_INPUT))
    if kind is LayerKind.C4:
        side += [(AUX1, stages.WEIGHTS_INPUT), (AUX2, stages.INDEXER_INPUT)]
    if side and conditions.aux_streams and conditions.parallel_inputs:
        return _fork(MAIN, list(side), stages.QUERY_INPUT, True)
    return stages.QUERY_INPUT + tuple(op for _, ops in side for op in on(MAIN, ops))


def stage_c(kind: LayerKind, conditions: Conditions) -> tuple[Node, ...]:
    """Preparation: queries, the indexer's queries, the compressors."""
    if kind is LayerKind.SWA:
        return stages.QUERY
    captured = conditions.region == "narrow"
    if kind is LayerKind.C128:
        compressor = stages.c128_compressor(conditions.boundary or captured)
        if conditions.aux_streams and not captured:
            return _fork(MAIN, [(AUX0, compressor)], stages.QUERY, False)
        return stages.QUERY + on(MAIN, compressor)
    branches = [(AUX0, _indexer_branch(conditions, captured)), (AUX1, stages.C4_COMPRESSOR)]
    if conditions.aux_streams:
        return _fork(MAIN, branches, stages.QUERY, True)
    return stages.QUERY + tuple(
        attrs.evolve(node, stream=MAIN) for _, nodes in branches for node in nodes if isinstance(node, Op)
    )


def _indexer_branch(conditions: Conditions, captured: bool) -> tuple[Node, ...]:
    compressor = stages.INDEXER_COMPRESSOR
    if conditions.short_context and not captured:
        return on(AUX0, compressor)
    query = stages.indexer_query(conditions.fp4)
    if conditions.aux_streams and not captured:
        return _fork(AUX0, [(AUX2, compressor)], query, False)
    return query + on(AUX0, compressor)


def stage_d(kind: LayerKind, conditions: Conditions) -> tuple[Node, ...]:
    """Sparse indexer and attention, on the main stream."""
    choose: tuple[Node, ...] = ()
    if kind is LayerKind.C4:
        if conditions.short_context and conditions.region != "narrow":
            choose = stages.FILL_INDICES
        else:
            choose = stages.indexer(conditions.fp4, conditions.prefill, conditions.decode)
    return choose + stages.attention(kind, conditions.prefill, conditions.decode)


@lru_cache(maxsize=4096)
def eager_region(kind: LayerKind, conditions: Conditions) -> tuple[Node, ...]:
    """What the layer's `Break` holds: stage D, in a wide region stage C as well."""
    preparation: tuple[Node, ...] = ()
    if conditions.region == "wide":
        preparation = (Acquire("preparation"), *stage_c(kind, conditions))
    nodes = (*preparation, Acquire("attention"), *stage_d(kind, conditions), Release("attention"))
    return (*nodes, Release("preparation")) if preparation else nodes


@lru_cache(maxsize=4096)
def layer(kind: LayerKind, conditions: Conditions, first: bool) -> tuple[Node, ...]:
    """One decoder layer in host order, from the hyper-connection into attention to the MoE's output.

    The leases ``mhc_ffn`` and ``ffn`` are still held at the end: the next layer (or `EXIT`) reads them.
    """
    take_over: tuple[Node, ...] = stages.EMBED
    if not first:
        take_over = (*stages.POST_FFN, Release("ffn"), Release("mhc_ffn"))
    return (
        Acquire("mhc_attn"),
        *take_over,
        Acquire("inputs"),
        *stage_a(kind, conditions),
        Acquire("norms"),
        *stages.NORMS,
        *_middle(kind, conditions),
        Acquire("projection"),
        *stages.PROJECTION,
        Release("output"),
        Acquire("mhc_ffn"),
        *stages.POST_ATTENTION,
        Release("projection"),
        Release("mhc_attn"),
        Acquire("ffn"),
        *stages.MOE,
    )


def _middle(kind: LayerKind, conditions: Conditions) -> tuple[Node, ...]:
    eager = eager_region(kind, conditions)
    spent = (Release("norms"), Release("inputs"))
    if conditions.region == "wide":
        return (Acquire("output"), Break(eager), *spent)
    prepared = (Acquire("preparation"), *stage_c(kind, conditions), *spent, Acquire("output"))
    middle: tuple[Node, ...] = (Break(eager),) if conditions.region == "narrow" else eager
    return (*prepared, *middle, Release("preparation"))


EXIT: tuple[Node, ...] = (*stages.HEAD, Release("ffn"), Release("mhc_ffn"))
"""After the last layer: the hyper-connection head reads what the last layer left."""


def unread_branches(nodes: tuple[Node, ...], stream: str) -> frozenset[Branch]:
    """Branches on a stream whose results no op outside of them reads: their join only orders bytes."""
    found: set[Branch] = set()
    for branch in _branches(nodes):
        inside = set(_ops(branch.nodes))
        written = {name for op in inside for name in op.writes}
        outside = (op for op in _ops(nodes) if op not in inside)
        if branch.stream == stream and not written & {name for op in outside for name in op.reads}:
            found.add(branch)
    return frozenset(found)


def _branches(nodes: tuple[Node, ...]) -> Iterator[Branch]:
    for node in nodes:
        if isinstance(node, Fork):
            for branch in node.branches:
                yield branch
                yield from _branches(branch.nodes)
            yield from _branches(node.body)


def _ops(nodes: tuple[Node, ...]) -> Iterator[Op]:
    for node in nodes:
        if isinstance(node, Op):
            yield node
        elif isinstance(node, Break):
            yield from _ops(node.nodes)
        elif isinstance(node, Fork):
            yield from _ops(node.body)
            for branch in node.branches:
                yield from _ops(branch.nodes)
