"""The least that a workload is: an MLP, eager only, without side streams, and in micro-batches if asked."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from workspace import Layout, spec
from workspace.errors import ConfigError, Unsupported
from workspace.sweep.workload import Step

LAYERS, HIDDEN, WIDE, MOST = 4, 1024, 4096, 512
SCRATCH = Layout("mlp", up=spec("T", WIDE, dtype=torch.bfloat16), act=spec("T", WIDE, dtype=torch.bfloat16))


class MLP:
    name, models, drivers = "mlp", ("small",), ("simulated",)

    def open(self, model: str, trace: Path | None, seed: int) -> "Session":
        if model not in self.models or trace is not None:
            raise ConfigError(f"the MLP has no model {model!r} with trace {trace}", "leave out --model and --trace")
        return Session(seed)


class Session:
    description = f"MLP: {LAYERS} layers, steps of up to {MOST} tokens"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def steps(self, count: int | None) -> Iterator[Step]:
        random = Random(self.seed)
        for index in range(20 if count is None else count):
            tokens = random.randint(4, MOST)
            yield Step(index, tokens, prefill_tokens=0, decode_tokens=tokens, requests=tokens)

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> "Runner":
        if mode != "eager":
            raise Unsupported(f"the MLP has no mode {mode!r}", "choose --mode eager")
        return Runner(ws, micro_batches)


class Runner:
    def __init__(self, ws: Any, micro_batches: int) -> None:
        self.ws = ws
        self.streams = [ws.stream(f"micro_batch_{i}") for i in range(micro_batches)]
        self.hidden = [ws.persistent(f"hidden_{i}", (MOST, HIDDEN), torch.bfloat16) for i in range(micro_batches)]
        ws.declare(SCRATCH, T=-(-MOST // micro_batches))
        ws.reserve()
        ws.lock()

    def run(self, step: Step) -> None:
        with self.ws.fork(*self.streams) as branch:
            for index, (stream, hidden) in enumerate(zip(self.streams, self.hidden, strict=True)):
                with branch(stream), self.ws.slot(micro_batch=index):
                    self.layers(hidden, -(-step.tokens // len(self.streams)))

    def layers(self, hidden: Any, tokens: int) -> None:
        launch = self.ws.device.launch  # stands for a kernel, with what it reads and writes
        for _ in range(LAYERS):
            with self.ws.lease(SCRATCH, T=tokens) as s:
                launch("up", reads=[hidden], writes=[s.up])
                launch("act", reads=[s.up], writes=[s.act])
                launch("down", reads=[s.act, hidden], writes=[hidden])

    def close(self) -> None:
        """Nothing outlives a step."""
