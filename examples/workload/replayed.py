"""Steps of the layer at true sizes: leases, forks and launches, without numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from examples.porting.after import ATTENTION, MIXTURE, STEP
from examples.porting.before import HIDDEN
from examples.porting.serving import reserve
from workspace.errors import Unsupported
from workspace.sweep.workload import Step

LAYERS = {"small": 2, "large": 8}
MOST = 512
"""Tokens of a step."""
SIZES = (32, 128, MOST)
"""Of the graphs; a step is padded to the next."""
MODES = ("eager", "full", "narrow")


class Session:
    def __init__(self, model: str, seed: int) -> None:
        self.layers, self.seed = LAYERS[model], seed
        self.description = f"ported layer: {self.layers} layers, steps of up to {MOST} tokens, seed {seed}"

    def steps(self, count: int | None) -> Iterator[Step]:
        """A few requests that generate, and now and then a prompt beside them."""
        random = Random(self.seed)
        for index in range(20 if count is None else count):
            prefill, decode = random.choice((0, 0, 0, 100, 480)), random.randint(4, 32)
            yield Step(index, prefill + decode, prefill, decode, decode + (prefill > 0))

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Runner:
        check_mode(mode)
        return Runner(ws, self.layers, mode, aux_streams, micro_batches)


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise Unsupported(f"the ported layer has no mode {mode!r}", f"choose --mode {' or '.join(MODES)}")


class Runner:
    def __init__(self, ws: Any, layers: int, mode: str, aux_streams: bool, micro_batches: int) -> None:
        self.ws, self.mode = ws, mode
        self.parts = [Part(ws, layers, index, aux_streams) for index in range(micro_batches)]
        share = -(-MOST // micro_batches)
        reserve(ws, share, (None,) if mode == "eager" else [part.lane for part in self.parts])
        if mode != "eager":
            for part in self.parts:
                part.capture(sorted({min(size, share) for size in SIZES}, reverse=True), mode == "narrow")

    def run(self, step: Step) -> None:
        """Each micro-batch on a stream of its own, joined to the caller's."""
        share = -(-step.tokens // len(self.parts))
        with self.ws.fork(*(part.main for part in self.parts)) as branch:
            for part in self.parts:
                with branch(part.main), self.ws.slot(micro_batch=part.index):
                    part.run(share)

    def close(self) -> None:
        for part in self.parts:
            for graph in part.graphs.values():
                graph.release()


class Part:
    """One micro-batch: streams, and graphs in a lane of its own."""

    def __init__(self, ws: Any, layers: int, index: int, aux_streams: bool) -> None:
        self.ws, self.layers, self.index, self.lane = ws, layers, index, f"graphs_{index}"
        self.main = ws.stream(f"main_{index}")
        self.side = ws.stream(f"side_{index}") if aux_streams else None
        self.input = ws.persistent(f"input_{index}", (MOST, HIDDEN), torch.float32)
        self.graphs: dict[int, Any] = {}

    def capture(self, sizes: list[int], broken: bool) -> None:
        """The largest first, so that the others find room in its bytes."""
        for size in sizes:
            with self.ws.slot(micro_batch=self.index), self.ws.on(self.main):
                with self.ws.capture(lane=self.lane) as capture:
                    self.step(size, capture.eager_break if broken else at_once)
            self.graphs[size] = capture.graph

    def run(self, tokens: int) -> None:
        if self.graphs:
            self.graphs[min(size for size in self.graphs if size >= tokens)].replay()
        else:
            self.step(tokens, at_once)

    def step(self, tokens: int, apart: Callable[[Callable[[], object]], object]) -> None:
        launch = self.ws.device.launch
        with self.ws.lease(STEP, T=tokens) as step:
            launch("embed", reads=[self.input], writes=[step.hidden])
            for _ in range(self.layers):
                self.attend(step.hidden, tokens, apart)
                self.mix(step.hidden, tokens)

    def attend(self, hidden: Any, tokens: int, apart: Callable[[Callable[[], object]], object]) -> None:
        launch = self.ws.device.launch
        with self.ws.lease(ATTENTION, T=tokens) as s:
            launch("norm", reads=[hidden], writes=[s.normed])
            launch("qkv", reads=[s.normed], writes=[s.qkv])
            qkv, o = s.qkv, s.o
            apart(lambda: launch("attention", reads=[qkv], writes=[o]))
            launch("out", reads=[s.o], writes=[s.projected])
            launch("add", reads=[s.projected, hidden], writes=[hidden])

    def mix(self, hidden: Any, tokens: int) -> None:
        launch = self.ws.device.launch
        with self.ws.lease(MIXTURE, T=tokens) as s:
            launch("norm", reads=[hidden], writes=[s.normed])
            if self.side is None:
                self.shared_expert(s)
                self.routed_experts(s)
            else:
                with self.ws.fork(self.side) as branch:
                    with branch(self.side):
                        self.shared_expert(s)
                    self.routed_experts(s)
            launch("add", reads=[s.shared, s.routed, hidden], writes=[hidden])

    def shared_expert(self, s: Any) -> None:
        launch = self.ws.device.launch
        launch("shared_in", reads=[s.normed], writes=[s.shared_gate_up])
        launch("swiglu", reads=[s.shared_gate_up], writes=[s.shared_act])
        launch("shared_out", reads=[s.shared_act], writes=[s.shared])

    def routed_experts(self, s: Any) -> None:
        launch = self.ws.device.launch
        launch("router", reads=[s.normed], writes=[s.logits])
        launch("route", reads=[s.logits], writes=[s.share])
        launch("experts_in", reads=[s.normed], writes=[s.gate_up])
        launch("swiglu", reads=[s.gate_up], writes=[s.act])
        launch("experts_out", reads=[s.act], writes=[s.down])
        launch("combine", reads=[s.share, s.down], writes=[s.routed])


def at_once(launch: Callable[[], object]) -> object:
    """What is no eager region, or eager already."""
    return launch()
