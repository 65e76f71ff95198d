"""A workload of three leases a layer, small enough to say exactly where a race must be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import workspace
from workspace.errors import ConfigError, Unsupported
from workspace.sweep.workload import Step

QUERY = workspace.Layout("query", q=workspace.spec("T", 64, dtype=torch.bfloat16))
INDEX = workspace.Layout("index", idx=workspace.spec("T", 8, dtype=torch.int32))
OUTPUT = workspace.Layout("output", out=workspace.spec("T", 128, dtype=torch.float32))
LAYERS = 3


class ThreeLeases:
    """The workload; its one model has `LAYERS` layers."""

    name = "three_leases"
    models = ("small",)
    drivers = ("simulated",)

    def open(self, model: str, trace: Path | None, seed: int) -> ThreeLeasesSession:
        """A session; any other model is refused."""
        if model not in self.models:
            raise ConfigError(f"there is no model {model!r}", "choose 'small'")
        return ThreeLeasesSession(seed)

    def execution(self, seed: int) -> Sums:
        """Real numbers."""
        return Sums()


class ThreeLeasesSession:
    """Eight steps of 16 to 128 tokens."""

    description = "three leases, 3 layers"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def steps(self, count: int | None) -> Iterator[Step]:
        """Steps whose size depends on the seed."""
        for index in range(8 if count is None else count):
            tokens = 16 * (1 + (index * 5 + self.seed) % 8)
            yield Step(index, tokens, tokens - 1, 1, 2)

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> ThreeLeasesRunner:
        """Refuses the wide mode, so that the sweep has a refusal to show."""
        if mode == "wide":
            raise Unsupported("no wide regions here", "choose another mode")
        return ThreeLeasesRunner(ws, aux_streams, micro_batches)


class ThreeLeasesRunner:
    """Each micro-batch runs its layers on a stream of its own, joined to the caller's at the end."""

    def __init__(self, ws: Any, aux_streams: bool, micro_batches: int) -> None:
        self.ws = ws
        self.aux = ws.stream("aux") if aux_streams else None
        self.streams = [ws.stream(f"micro_batch{part}") for part in range(micro_batches)]
        for layout in (QUERY, INDEX, OUTPUT):
            ws.declare(layout, T=128)
        ws.reserve()

    def run(self, step: Step) -> None:
        """Enqueue the step."""
        if len(self.streams) == 1:
            self._layers(step.tokens)
            return
        with self.ws.fork(*self.streams) as branch:
            for part, stream in enumerate(self.streams):
                with branch(stream), self.ws.slot(micro_batch=part):
                    self._layers(step.tokens // len(self.streams))

    def _layers(self, tokens: int) -> None:
        launch = self.ws.device.launch
        for _ in range(LAYERS):
            with ExitStack() as leases:
                query = leases.enter_context(self.ws.lease(QUERY, T=tokens))
                index = leases.enter_context(self.ws.lease(INDEX, T=tokens))
                launch("project", writes=[query.q])
                if self.aux is None:
                    launch("select", writes=[index.idx])
                else:
                    with self.ws.fork(self.aux) as branch, branch(self.aux):
                        launch("select", writes=[index.idx])
                output = leases.enter_context(self.ws.lease(OUTPUT, T=tokens))
                launch("attend", reads=[query.q, index.idx], writes=[output.out])

    def close(self) -> None:
        """Nothing outlives a step."""


class Sums:
    """Each micro-batch adds up what it wrote into a lease, several times over."""

    description = "sums of leases"

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> SumsProgram:
        """Any mode computes the same."""
        return SumsProgram(ws, micro_batches)


class SumsProgram:
    """The sums on one workspace."""

    def __init__(self, ws: Any, micro_batches: int) -> None:
        self.ws = ws
        self.streams = [ws.stream(f"micro_batch{part}") for part in range(micro_batches)]

    def run(self) -> list[torch.Tensor]:
        """Sums of numbers that tell micro-batches and turns apart."""
        found = []
        for turn in range(4):
            with self.ws.fork(*self.streams) as branch:
                for part, stream in enumerate(self.streams):
                    with self.ws.slot(micro_batch=part), branch(stream), self.ws.lease(OUTPUT, T=8) as scratch:
                        found.append(self.sums(scratch.out, 2 * turn + part))
        self.ws.synchronize()
        return found

    def sums(self, out: Any, value: int) -> torch.Tensor:
        """Of a tensor filled with a value."""
        out.fill_(value)
        return torch.sum(out, 1)

    def close(self) -> None:
        """Nothing outlives a run."""


class Replayed(ThreeLeases):
    """A workload that cannot compute."""

    execution = None  # type: ignore[assignment]


class Failing(ThreeLeases):
    """A workload whose operators fail on what an unsafe strategy gives them."""

    def execution(self, seed: int) -> Sums:
        """Sums that read behind the end of a table."""
        return FailingSums()


class FailingSums(Sums):
    """See `Failing`."""

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> SumsProgram:
        """Fails under the strategy `unfenced` only."""
        made = FailingProgram if ws.strategy == "unfenced" else SumsProgram
        return made(ws, micro_batches)


class FailingProgram(SumsProgram):
    """See `Failing`."""

    def sums(self, out: Any, value: int) -> torch.Tensor:
        """An index out of range, as a corrupted one would be."""
        return torch.index_select(super().sums(out, value), 0, torch.full((1,), 99))
