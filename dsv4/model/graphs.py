"""The graphs of one micro-batch, one a bucket: captured once, replayed on any step that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import torch

from dsv4.batch import Batch, batch_of, dummy
from dsv4.errors import RunError
from dsv4.model.context import Context
from dsv4.model.decoder import Decoder, Outcome, outcome
from dsv4.model.forward import Forward
from dsv4.model.graph_metadata import padding_of, persist_metadata
from dsv4.model.metadata import Padding, metadata
from dsv4.model.reserve import lane_of, persist_results, suffix_of
from dsv4.model.upload import Buffer
from dsv4.options import Options
from dsv4.scheduler import Rows
from workspace import Slot


@attrs.frozen(eq=False)
class Bucket:
    """A graph, the walk it was captured from, and the shape of its metadata."""

    graph: Any
    walk: Forward
    padding: Padding


class Graphs:
    """Graphs of a decoder on its main stream.

    What they read of a step lies in one buffer at a stable address, filled before each replay; padding rows have slots
    of -1. Eager regions run from the step's own metadata, on tensors that the graph holds at the break. Results go to
    tensors that live as long as the workspace: the next replay overwrites them.

    Parameters
    ----------
    index
        Of the micro-batch.

    Raises
    ------
    RunError
        The mode has graphs, and what the workspace's device is given to capture would not be replayed.
    """

    def __init__(self, decoder: Decoder, options: Options, index: int) -> None:
        self._decoder, self._options, self._index = decoder, options, index
        self.sizes = options.sizes(decoder.engine)
        self._buckets: dict[int, Bucket] = {}
        self._replaying: Forward | None = None
        if self.sizes:
            _check_captures(decoder.ws.device, options.mode)
            self._persist(suffix_of(index))

    def _persist(self, suffix: str) -> None:
        decoder = self._decoder
        given = decoder.ws, decoder.shard, decoder.precision
        self._buffer = Buffer(persist_metadata(*given, decoder.engine, self._options, suffix))
        self._residual, self._hidden = persist_results(*given, self.sizes[-1], suffix, decoder.keeps_streams)

    def fitting(self, batch: Batch) -> int:
        """Size of the smallest graph that takes a batch; 0: none does, and it runs eagerly."""
        if not self.sizes or batch.tokens > self.sizes[-1] or (self._options.mode == "full" and batch.prefill):
            return 0
        return self.sizes[bisect_left(self.sizes, batch.tokens)]

    def capture(self, tokens: int) -> None:
        """Capture the graph of that size, unless there is one. Nothing is enqueued.

        Capture the largest first where several are wanted: the smaller ones then share its bytes.
        """
        decoder, ws = self._decoder, self._decoder.ws
        if not tokens or tokens in self._buckets:
            return
        batch = dummy(tokens, decoder.shard, decoder.engine)
        padding = padding_of(tokens, decoder.engine, self._options)
        with ws.slot(micro_batch=self._index), ws.on(decoder.main):
            if getattr(ws.device, "type", "") == "cuda":
                torch.cuda.current_blas_handle()  # made now: a thread's first product cannot be captured
            meta = self._buffer.place(self._metadata((), {}, padding))
            walk = decoder.walk(decoder.body, batch, meta, self._options.region)
            walk.hidden = self._hidden[:tokens]
            walk.residual = None if self._residual is None else self._residual[:tokens]
            with ws.capture(lane=lane_of(self._index)) as capture:
                walk.broken = partial(self._break, capture)
                decoder.enqueue(walk)
        self._buckets[tokens] = Bucket(capture.graph, walk, padding)

    def replay(self, tokens: int, rows: Sequence[Rows], contexts: Mapping[int, Context]) -> Outcome:
        """Run a step, whose requests have taken their blocks, through the graph of that size."""
        decoder, bucket = self._decoder, self._buckets[tokens]
        batch = batch_of(tuple(rows), decoder.shard, decoder.engine)
        meta = self._buffer.fill(self._metadata(rows, contexts, bucket.padding))
        self._replaying = decoder.walk(decoder.body, batch, meta, self._options.region)
        try:
            with torch.no_grad():
                bucket.graph.replay()
        finally:
            self._replaying = None
        return outcome(bucket.walk, rows)

    def close(self) -> None:
        """Release the graphs."""
        for bucket in self._buckets.values():
            bucket.graph.release()
        self._buckets = {}

    def _metadata(self, rows: Sequence[Rows], contexts: Mapping[int, Context], padding: Padding) -> Any:
        return metadata(rows, contexts, self._decoder.caches, self._decoder.engine, padding)

    def _break(self, capture: Any, walk: Forward) -> None:
        """Divide the capture where a layer's eager region is, which finds in its place what is leased now."""
        held = {name: SimpleNamespace(**_tensors(lease)) for name, lease in walk.leases.items()}
        capture.eager_break(partial(self._region, walk.place, held))

    def _region(self, place: int, held: dict[str, Any]) -> None:
        """The eager region of a layer; nothing while the graph is being captured, when there is no step."""
        if self._replaying is not None:
            self._replaying.run_region(place, held)


def _check_captures(device: Any, mode: str) -> None:
    """Without an order of its own, a device runs operators as they are captured."""
    if getattr(device, "type", "") != "cuda" and not getattr(device, "deferred", False):
        raise RunError(
            f"mode {mode!r} on {device}: its operators run at once and cannot be captured",
            "use mode 'eager', a CUDA device, or a simulated.Device(execution='deferred')",
        )


def _tensors(lease: Any) -> dict[str, Any]:
    """A lease's tensors, those made that a region writes first."""
    return {name: one.tensor() if isinstance(one, Slot) else one for name, one in lease.tensors.items()}
