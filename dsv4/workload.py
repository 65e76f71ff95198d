"""The sweep's workload: DeepSeek-V4's scratch, step by step, for the requests of a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from dsv4.configfile import resolve
from dsv4.engine import Engine
from dsv4.options import Options
from dsv4.presets import PRESETS
from dsv4.runner import Runner
from dsv4.scheduler import Request, Scheduler, Step
from dsv4.shard import Shard
from dsv4.trace import generate, read

DEFAULT_STEPS = 100

WARM_UP = 400
"""Steps scheduled and not replayed, so that the first replayed one sees the load of a running server."""

LONG_TRACE = 2000
"""Requests from which on a trace has steps to spare for `WARM_UP`."""


class DSV4:
    """Workload ``dsv4``: presets ``flash`` and ``pro``, or any ``config.json`` of the family.

    Parameters
    ----------
    engine
        Limits of the serving engine.
    merge, draft, drop_join
        See `Options`; the sweep uses the defaults.
    """

    name = "dsv4"
    models = tuple(PRESETS)
    drivers = ("simulated", "cuda")

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        merge: bool = True,
        draft: bool = False,
        drop_join: str | None = None,
        **shard: Any,
    ) -> None:
        self.engine = engine or Engine()
        self._shard = shard
        self._options = Options(merge=merge, draft=draft, drop_join=drop_join)

    def open(self, model: str, trace: Path | None, seed: int) -> Session:
        """A session over the requests of a trace file, or of a generated trace.

        Raises `ModelConfigError` or `TraceError`.
        """
        requests = generate(seed) if trace is None else read(trace)
        source = f"generated trace, seed {seed}" if trace is None else trace.name
        return Session(Shard(resolve(model), **self._shard), self.engine, self._options, model, requests, source)

    def execution(self, seed: int) -> Any:
        """The small model that computes real numbers; see `dsv4.model.execution`."""
        from dsv4.model.execution import Execution  # which takes longer to import than a replay to start

        return Execution(seed=seed)

    def timed(self, model: str, seed: int, device: str) -> Any:
        """The model as it is but for fewer and smaller experts; see `dsv4.model.timed`."""
        from dsv4.model.timed import Timed

        return Timed(model, seed, device)


class Session:
    """One model and the steps a scheduler makes of one trace."""

    def __init__(
        self, shard: Shard, engine: Engine, options: Options, model: str, requests: list[Request], source: str
    ) -> None:
        self.shard = shard
        self.engine = engine
        self._options = options
        self._requests = requests
        self._expected: list[Step] = []
        self.description = (
            f"DeepSeek-V4 {model}: {shard.config.num_hidden_layers} layers, TP{shard.tensor_parallel}, "
            f"{shard.indexer} indexer; {len(requests)} requests ({source})"
        )

    def steps(self, count: int | None) -> Iterator[Step]:
        """The first `count` steps (None: 100) of a server under the trace's load."""
        self._expected = []
        for step in self._replayed(DEFAULT_STEPS if count is None else count):
            self._expected.append(step)
            yield step

    def _replayed(self, count: int) -> Iterator[Step]:
        skipped = WARM_UP if len(self._requests) >= LONG_TRACE else 0
        for index, step in enumerate(self._scheduled()):
            if index >= skipped + count:
                return
            if index >= skipped:
                yield attrs.evolve(step, index=index - skipped)

    def _scheduled(self) -> Iterator[Step]:
        """Requests join when the clock reaches their arrival; a step moves it on by the assumed time."""
        engine = self.engine
        scheduler = Scheduler(engine.max_num_batched_tokens, engine.max_num_seqs, engine.max_model_len)
        waiting = deque(self._requests)
        clock = 0.0
        while waiting or scheduler.unfinished:
            if not scheduler.unfinished:
                clock = max(clock, waiting[0].arrival)
            while waiting and waiting[0].arrival <= clock:
                scheduler.add(waiting.popleft())
            step = scheduler.step()
            assert step is not None
            clock += engine.step_seconds + engine.token_seconds * step.tokens
            yield step

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Runner:
        """Make the model ready on a workspace; graphs are captured for the steps last handed out."""
        options = attrs.evolve(self._options, mode=mode, aux_streams=aux_streams, micro_batches=micro_batches)
        return Runner(ws, self.shard, self.engine, options, self._expected)
