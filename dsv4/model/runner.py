"""Steps of many requests through the decoder: in the five run modes, in one or two micro-batches, with a draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dsv4.batch import batch_of
from dsv4.cache.caches import Caches
from dsv4.engine import Engine
from dsv4.errors import RunError
from dsv4.model.context import Context
from dsv4.model.decoder import Decoder, Draft, Outcome, outcome
from dsv4.model.forward import AllReduce
from dsv4.model.graphs import Graphs
from dsv4.model.merge import in_order, rows_of
from dsv4.model.precision import Precision
from dsv4.model.reserve import suffix_of
from dsv4.model.weights import DraftWeights, ModelWeights
from dsv4.options import Options
from dsv4.scheduler import Rows
from dsv4.shard import Shard

Contexts = Mapping[int, Context]


class Runner:
    """A model on a workspace whose scratch was reserved (`dsv4.model.reserve.reserve`).

    Micro-batches run on streams of their own, layer by layer in turn on one host thread. Each has caches of its own,
    and a request stays in the micro-batch that took it first: nothing but an edge could order what two streams do to
    one page. Work starts after what the caller's current stream holds, which also comes after it.

    Parameters
    ----------
    caches
        Of each micro-batch.
    options
        Run mode, aux streams, micro-batches.
    draft, draft_caches
        The MTP block and its caches, one for each micro-batch.

    Raises
    ------
    RunError
        The caches are not as many as the micro-batches, or the options ask for joins to be dropped: with real caches
        what a branch writes is always read.
    """

    def __init__(
        self,
        ws: Any,
        shard: Shard,
        precision: Precision,
        engine: Engine,
        weights: ModelWeights,
        caches: Sequence[Caches],
        options: Options,
        *,
        draft: DraftWeights | None = None,
        draft_caches: Sequence[Caches] = (),
        all_reduce: AllReduce | None = None,
    ) -> None:
        _check(options, caches, draft, draft_caches)
        self.ws = ws
        self.decoders = [
            Decoder(
                ws, shard, precision, engine, weights, one,
                aux_streams=options.aux_streams, suffix=suffix_of(index), all_reduce=all_reduce,
                keeps_streams=draft is not None,
            )
            for index, one in enumerate(caches)
        ]  # fmt: skip
        self.graphs = [Graphs(decoder, options, index) for index, decoder in enumerate(self.decoders)]
        self.drafts: list[Draft] = []
        if draft is not None:
            pairs = zip(self.decoders, draft_caches, strict=True)
            self.drafts = [Draft(decoder, draft, own) for decoder, own in pairs]

    def forward(self, rows: Sequence[Rows], contexts: Contexts) -> Outcome:
        """One step: the rows of every request that takes part, decode rows first.

        What it returns is overwritten by the next step where a graph ran.

        Raises
        ------
        CacheFull
            A request needs more blocks than are free. What other requests hold is untouched.
        """
        shares = self.take(rows, contexts)
        for index, own in shares.items():
            self.graphs[index].capture(self._fitting(index, own))
        found: dict[int, Outcome] = {}
        alone = len(shares) == 1
        self._take_turns({index: self._pass(index, own, contexts, found, alone) for index, own in shares.items()})
        return in_order(rows, shares, found)

    def draft(self, rows: Sequence[Rows], contexts: Contexts, residual: torch.Tensor) -> Outcome:
        """The MTP block over rows of requests that have been in a step: `Draft.forward`, in a lane of its own."""
        shares = self._shares(rows, contexts)
        found: dict[int, Outcome] = {}

        def drafting(index: int, own: Sequence[Rows]) -> Iterator[None]:
            given = residual if len(shares) == 1 else rows_of(rows, own, residual)
            with self.ws.slot(lane="draft"):
                found[index] = self.drafts[index].forward(own, contexts, given)
            yield

        self._take_turns({index: drafting(index, own) for index, own in shares.items()})
        return in_order(rows, shares, found)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, V] of rows [N, H] of `Outcome.hidden`, on the current stream."""
        return self.decoders[0].logits(hidden)

    def take(self, rows: Sequence[Rows], contexts: Contexts) -> dict[int, list[Rows]]:
        """Take the blocks of a step; its rows by micro-batch.

        A new request goes where the smallest part of the caches is taken.
        """
        for one in rows:
            context = contexts[one.request]
            context.blocks_of(self.decoders[self.home(context)].caches).extend(one.start, one.end)
        return self._shares(rows, contexts)

    def close(self) -> None:
        """Release the graphs; leases are none between steps, streams belong to the device."""
        for graphs in self.graphs:
            graphs.close()

    def home(self, context: Context) -> int:
        """The micro-batch that holds a request's blocks; of one without any, that which would take it now."""
        for index, decoder in enumerate(self.decoders):
            if context.holds(decoder.caches):
                return index
        return min(range(len(self.decoders)), key=lambda index: _load(self.decoders[index].caches))

    def _shares(self, rows: Sequence[Rows], contexts: Contexts) -> dict[int, list[Rows]]:
        shares: dict[int, list[Rows]] = {}
        for one in rows:
            shares.setdefault(self.home(contexts[one.request]), []).append(one)
        return dict(sorted(shares.items()))

    def _fitting(self, index: int, rows: Sequence[Rows]) -> int:
        decoder = self.decoders[index]
        return self.graphs[index].fitting(batch_of(tuple(rows), decoder.shard, decoder.engine))

    def _pass(
        self, index: int, rows: Sequence[Rows], contexts: Contexts, found: dict[int, Outcome], alone: bool
    ) -> Iterator[None]:
        """Enqueue a micro-batch, yielding where another may take its turn."""
        tokens = self._fitting(index, rows)
        if tokens:
            found[index] = self.graphs[index].replay(tokens, rows, contexts)
            return
        walk = self.decoders[index].prepared(rows, contexts)
        if alone:
            self.decoders[index].enqueue(walk)
        else:
            yield from self.decoders[index].layers(walk)
        found[index] = outcome(walk, rows)

    def _take_turns(self, passes: dict[int, Iterator[None]]) -> None:
        ws, left = self.ws, dict(passes)
        mains = {index: self.decoders[index].main for index in passes}

        def turn(branch: Any, index: int, part: Callable[[Any], object]) -> object:
            with ws.slot(micro_batch=index), branch(mains[index]):
                return part(left[index])

        with ws.fork(*mains.values()) as branch:
            try:
                while left:
                    for index in list(left):
                        if turn(branch, index, lambda one: next(one, one)) is left[index]:
                            del left[index]
            finally:
                for index in left:  # after an error: the leases of the others go back, too
                    turn(branch, index, lambda one: one.close())


def _load(caches: Caches) -> float:
    """How full its groups are, taken together."""
    return sum(1 - one.free_blocks / one.blocks for one in caches.allocators.values())


def _check(
    options: Options, caches: Sequence[Caches], draft: DraftWeights | None, draft_caches: Sequence[Caches]
) -> None:
    if options.drop_join:
        raise RunError(f"drop_join={options.drop_join!r} with real caches", "drop joins in a replay of `dsv4.runner`")
    for what, given in (("caches", caches), *([("draft_caches", draft_caches)] if draft else [])):
        if len(given) != options.micro_batches:
            raise RunError(
                f"{len(given)} {what} for {options.micro_batches} micro-batches", "give each micro-batch its own"
            )
