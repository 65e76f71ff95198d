"""The decoder and its MTP block: what a runner holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from dsv4 import ops
from dsv4.batch import Batch, batch_of
from dsv4.cache.caches import Caches
from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.model import attend, finish, prepare
from dsv4.model.context import Context
from dsv4.model.forward import AllReduce, Forward
from dsv4.model.layer import Body, layers_of
from dsv4.model.linear import linear
from dsv4.model.metadata import Metadata, Padding, metadata
from dsv4.model.precision import Precision
from dsv4.model.reserve import persist
from dsv4.model.route import Routes
from dsv4.model.scratch import draft_entry
from dsv4.model.sizes import dims_of_step
from dsv4.model.upload import Uploads
from dsv4.model.weights import DraftWeights, ModelWeights
from dsv4.ops.rope import table
from dsv4.plan import conditions_of
from dsv4.scheduler import Rows
from dsv4.shard import Shard
from dsv4.stages import MAIN
from dsv4.topology import AUX_STREAMS, Conditions

KERNELS = prepare.KERNELS | attend.KERNELS | finish.KERNELS


@attrs.frozen(eq=False)
class Outcome:
    """What a forward pass leaves, in the framework's memory.

    Attributes
    ----------
    hidden
        [T, H], after the head and the final norm.
    residual
        [T, S, H], the streams before the head, which the MTP block takes; None where they are not kept.
    sampled
        Rows whose request wants its next token, in the order of the step.
    """

    hidden: torch.Tensor
    residual: Any
    sampled: tuple[int, ...]


class Decoder:
    """A model on a workspace. Every forward pass takes its scratch from leases, one a stage.

    Work goes to the caller's current stream, and to the aux streams where `dsv4.topology` forks.

    Parameters
    ----------
    engine
        Limits; they size the RoPE tables and what is kept for the life of the workspace.
    caches
        The model's paged caches.
    aux_streams
        Whether layers fork to side streams.
    suffix
        Tells the streams and persistent tensors of several micro-batches apart.
    all_reduce
        Sums over the ranks of the shard (`dsv4.parallel`); without it a shard of several ranks computes its own part.
    keeps_streams
        Whether a pass leaves its streams for the MTP block.
    """

    def __init__(
        self,
        ws: Any,
        shard: Shard,
        precision: Precision,
        engine: Engine,
        weights: ModelWeights,
        caches: Caches,
        *,
        aux_streams: bool = True,
        suffix: str = "",
        all_reduce: AllReduce | None = None,
        keeps_streams: bool = True,
    ) -> None:
        self.ws, self.shard, self.precision, self.engine = ws, shard, precision, engine
        self.weights, self.caches, self.aux_streams = weights, caches, aux_streams
        self.all_reduce, self.keeps_streams = all_reduce, keeps_streams
        self.streams = {name: ws.stream(name + suffix) for name in AUX_STREAMS}
        self.main = ws.stream(MAIN + suffix)
        chosen = persist(ws, shard, engine, suffix)
        tables = {kind: self.table(kind) for kind in set(caches.kinds)}
        self.body = Body(layers_of(weights.layers, caches, tables), caches, self._embed, weights.head, chosen)
        self._uploads = Uploads(weights.embed)
        self._routes: dict[Conditions, Routes] = {}

    def table(self, kind: LayerKind) -> torch.Tensor:
        """The RoPE table of a kind of layer, where the weights are."""
        made = table(self.shard.config, kind, self.engine.max_model_len, self.precision.wide)
        return made.to(self.weights.embed.device)

    def forward(self, rows: Sequence[Rows], contexts: Mapping[int, Context], padding: Padding | None = None) -> Outcome:
        """One step: the rows of every request that takes part, decode rows first.

        Parameters
        ----------
        contexts
            Each request's tokens and blocks, by the number in its rows.
        padding
            Rows to pad the step to.

        Raises
        ------
        CacheFull
            A request needs more blocks than are free. What other requests hold is untouched.
        """
        walk = self.prepared(rows, contexts, padding)
        self.enqueue(walk)
        return outcome(walk, rows)

    def prepared(
        self, rows: Sequence[Rows], contexts: Mapping[int, Context], padding: Padding | None = None
    ) -> Forward:
        """A forward pass that has taken its blocks and brought its metadata to the device: ready to walk."""
        for one in rows:
            contexts[one.request].blocks_of(self.caches).extend(one.start, one.end)
        return self.eager(self.body, rows, contexts, padding)

    def enqueue(self, walk: Forward) -> None:
        """Enqueue a prepared pass as a whole."""
        with torch.no_grad():
            for _ in walk.walk():
                pass

    def layers(self, walk: Forward) -> Iterator[None]:
        """Enqueue a prepared pass, yielding after each layer, where another micro-batch may take its turn."""
        layers = walk.walk()
        while True:
            # Not around the yields: passes that take turns would restore each other's grad mode.
            with torch.no_grad():
                if next(layers, layers) is layers:
                    return
            yield

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, V] of rows [N, H] of `Outcome.hidden`, on the current stream."""
        with torch.no_grad():
            return torch.mm(hidden, self.weights.lm_head.T)

    def eager(
        self,
        body: Body,
        rows: Sequence[Rows],
        contexts: Mapping[int, Context],
        padding: Padding | None = None,
        shift: int = 0,
    ) -> Forward:
        """A forward pass through a body whose blocks the requests have taken; see `metadata`."""
        batch = batch_of(tuple(rows), self.shard, self.engine)
        host = metadata(rows, contexts, body.caches, self.engine, padding, shift)
        return self.walk(body, batch, self._uploads.fill(host))

    def walk(self, body: Body, batch: Batch, meta: Metadata, region: str = "none") -> Forward:
        """A forward pass on metadata of the device, with the eager region of that name."""
        tokens = meta.positions.shape[0]
        conditions = conditions_of(batch, self.shard, region, self.aux_streams, tokens)
        dims = {kind: dims_of_step(meta, batch, kind, self.engine, tokens) for kind in set(body.caches.kinds)}
        routes = self._routes.get(conditions)
        if routes is None:
            routes = self._routes[conditions] = Routes(conditions, Forward, KERNELS, self.streams)
        given = self.ws, self.shard, self.precision, body, meta, dims, routes, self.streams
        return Forward(*given, self.all_reduce, self.keeps_streams)

    def _embed(self, f: Forward, residual: Any) -> None:
        """The embedding, once for each stream."""
        ids = f.meta.tokens.repeat_interleave(self.shard.config.hc_mult)
        torch.index_select(self.weights.embed, 0, ids, out=residual.flatten(0, 1))


class Draft:
    """The MTP block beside its target: one SWA-only layer that guesses the token after the next.

    It has caches of its own; embedding, lm_head and workspace are the target's. Draft in a lane of the workspace
    (``with ws.slot(lane="draft")``) where graphs of the target exist.
    """

    def __init__(self, target: Decoder, weights: DraftWeights, caches: Caches) -> None:
        self.target = target
        self.weights = weights
        self.caches = caches
        layers = layers_of((weights.layer,), caches, {LayerKind.SWA: target.table(LayerKind.SWA)})
        self.body = Body(layers, caches, self._enter, weights.head, None)

    def forward(self, rows: Sequence[Rows], contexts: Mapping[int, Context], residual: torch.Tensor) -> Outcome:
        """Draft from the target's streams: row p takes the residual of position p and the token of p + 1.

        Parameters
        ----------
        residual
            [T, S, H], `Outcome.residual` of the target (or of a draft before) for the same rows.
        """
        for one in rows:
            contexts[one.request].blocks_of(self.caches).extend(one.start, one.end)
        walk = self.target.eager(self.body, rows, contexts, shift=1)
        walk.given = residual
        self.target.enqueue(walk)
        return outcome(walk, rows)

    def _enter(self, f: Forward, streams: Any) -> None:
        """streams = h_proj(hnorm(R)) + e_proj(enorm(embedding)); the embedding is zero at position 0."""
        own, eps, embed = self.weights, f.config.rms_norm_eps, self.target.weights.embed
        with f.ws.lease(draft_entry(f.shard, f.precision), T=f.tokens) as s:
            torch.index_select(embed, 0, f.meta.tokens, out=s.embedded)
            s.embedded.masked_fill_(f.meta.positions[:, None] == 0, 0)
            ops.rms_norm(s.embedded, own.enorm, eps, out=s.normed)
            linear(s.normed, own.e_proj, out=s.projected)
            ops.rms_norm(f.given.flatten(0, 1), own.hnorm, eps, out=s.streams.flatten(0, 1))
            linear(s.streams.flatten(0, 1), own.h_proj, out=streams.flatten(0, 1))
            streams.add_(s.projected[:, None])


def outcome(walk: Forward, rows: Sequence[Rows]) -> Outcome:
    """What a finished walk left."""
    sampled, end = [], 0
    for one in rows:
        end += one.count
        if one.samples:
            sampled.append(end - 1)
    return Outcome(walk.hidden, walk.residual, tuple(sampled))
