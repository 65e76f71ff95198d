"""Replays steps on a workspace: leases, forks and launches at true sizes, in the five run modes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dsv4.batch import Batch, batch_of, decode_rows, dummy, split
from dsv4.engine import Engine
from dsv4.errors import RunError
from dsv4.layouts import persistent_tensors
from dsv4.microbatch import MicroBatch
from dsv4.options import Options
from dsv4.plan import Calls, Plan
from dsv4.planner import Planner
from dsv4.reserve import declare, declare_graphs
from dsv4.scheduler import Step
from dsv4.shard import Shard


class Runner:
    """A model made ready on one workspace; `dsv4.options.Options` says what `run` does.

    Parameters
    ----------
    expected
        Steps whose graphs are captured now; other buckets are captured by the first step that needs them.
    """

    def __init__(self, ws: Any, shard: Shard, engine: Engine, options: Options, expected: Iterable[Step] = ()) -> None:
        if not hasattr(ws.device, "launch"):
            raise RunError(f"a replay launches on a simulated device, not on {ws.device}", "use driver 'simulated'")
        self.ws, self.shard, self.engine, self.options = ws, shard, engine, options
        parts = options.micro_batches
        self.sizes = options.sizes(engine)
        declare(ws, shard, engine, parts)
        for index in range(parts if self.sizes else 0):
            declare_graphs(ws, shard, engine, options.region, self.sizes[-1], _lane(index))
        ws.reserve()
        share = -(-engine.max_num_batched_tokens // parts)
        persistent = persistent_tensors(shard, share, engine.max_model_len)
        self.planners = [Planner(MicroBatch(ws, index, persistent), shard, engine, options) for index in range(parts)]
        self._graphs: dict[tuple[int, int], Any] = {}
        with torch.no_grad():
            self._capture_for(expected)

    # -- steps -------------------------------------------------------------------------------------------
    def run(self, step: Step) -> None:
        """Enqueue one step."""
        with torch.no_grad():
            batches = self._batches(step)
            for planner, batch in zip(self.planners, batches, strict=False):
                self._capture_bucket(planner, self._bucket(batch))
            if len(self.planners) == 1:
                with self.ws.on(self.planners[0].micro_batch.main):
                    for _ in self._walk(self.planners[0], batches[0]):
                        pass
            else:
                self._take_turns(batches)

    def _batches(self, step: Step) -> list[Batch]:
        parts = split(step) if len(self.planners) == 2 else (step.rows,)
        return [batch_of(rows, self.shard, self.engine) for rows in parts]

    def _take_turns(self, batches: list[Batch]) -> None:
        """Micro-batches layer by layer in turn on one host thread, each on streams of its own."""
        walks = [(one.micro_batch, self._walk(one, batch)) for one, batch in zip(self.planners, batches, strict=False)]
        slot = self.ws.slot
        with self.ws.fork(*(micro_batch.main for micro_batch, _ in walks)) as branch:
            while walks:
                for one in list(walks):
                    micro_batch, walk = one
                    with slot(micro_batch=micro_batch.index), branch(micro_batch.main):
                        if next(walk, walk) is walk:
                            walks.remove(one)

    def _walk(self, planner: Planner, batch: Batch) -> Iterator[None]:
        """Enqueue a micro-batch, yielding where another may take its turn."""
        _issue(planner.prepare)
        size = self._bucket(batch)
        if size:
            planner.micro_batch.plan = planner.regions(batch, self.options.region, size)
            self._graphs[planner.micro_batch.index, size].replay()
        else:
            yield from _layers(planner.micro_batch, planner.step(batch, "none", batch.tokens))
            if self.options.draft and batch.decode:
                with self.ws.slot(lane="draft"):
                    yield from _layers(planner.micro_batch, planner.draft(decode_rows(batch)))

    # -- graphs ------------------------------------------------------------------------------------------
    def _bucket(self, batch: Batch) -> int:
        """Size of the graph the batch is padded to, 0 when none fits."""
        if not self.sizes or batch.tokens > self.sizes[-1] or (self.options.mode == "full" and batch.prefill):
            return 0
        return self.sizes[bisect_left(self.sizes, batch.tokens)]

    def _capture_for(self, steps: Iterable[Step]) -> None:
        """Capture the buckets of these steps, the largest first, so that the smaller ones share its bytes.

        In mode ``overflow`` all of its few buckets, which hardly any step needs, are captured.
        """
        needed = set()
        if self.options.mode == "overflow":
            needed = {(size, index) for size in self.sizes for index in range(len(self.planners))}
        for step in steps if self.sizes else ():
            for index, batch in enumerate(self._batches(step)):
                needed.add((self._bucket(batch), index))
        for size, index in sorted(needed, reverse=True):
            self._capture_bucket(self.planners[index], size)

    def _capture_bucket(self, planner: Planner, size: int) -> None:
        micro_batch = planner.micro_batch
        if not size or (micro_batch.index, size) in self._graphs:
            return
        plan = planner.step(dummy(size, self.shard, self.engine), self.options.region, size)
        with self.ws.slot(micro_batch=micro_batch.index), self.ws.on(micro_batch.main):
            with self.ws.capture(lane=_lane(micro_batch.index)) as capture:
                micro_batch.plan, micro_batch.capture = plan, capture
                for _ in _layers(micro_batch, plan):
                    pass
        micro_batch.capture = None
        self._graphs[micro_batch.index, size] = capture.graph

    def close(self) -> None:
        """Release the graphs; leases are none between steps, streams belong to the device."""
        for graph in self._graphs.values():
            graph.release()
        self._graphs = {}


def _lane(index: int) -> str:
    return f"micro_batch.{index}"


def _issue(calls: Calls) -> None:
    for call in calls:
        call()


def _layers(micro_batch: MicroBatch, plan: Plan) -> Iterator[None]:
    for stages, calls in plan.layers:
        micro_batch.enter(stages)
        for call in calls:
            call()
        yield
    _issue(plan.leave)
