"""Real numbers: the ported layers themselves, few and small, in the settings that the sweep asks for."""

from __future__ import annotations

from typing import Any

import torch

from examples.porting.after import After
from examples.porting.before import HIDDEN, Weights, angles
from examples.porting.serving import reserve
from examples.workload.replayed import at_once, check_mode

CPU = torch.device("cpu")
LAYERS, TOKENS = 2, 12


class Computed:
    description = f"{LAYERS} ported layers, {TOKENS} tokens a micro-batch"

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Program:
        check_mode(mode)
        return Program(ws, mode, After if aux_streams else Alone, micro_batches, self.seed)


class Alone(After):
    """Without a side stream."""

    def experts(self, s: Any) -> None:
        self.shared_expert(s)
        self.routed_experts(s)


class Program:
    def __init__(self, ws: Any, mode: str, kind: type[After], micro_batches: int, seed: int) -> None:
        self.ws = ws
        self.parts = [Computing(ws, index, kind, seed) for index in range(micro_batches)]
        reserve(ws, TOKENS, (None,) if mode == "eager" else [part.lane for part in self.parts])
        ws.synchronize()
        for part in self.parts if mode != "eager" else ():
            part.capture(mode == "narrow")

    def run(self) -> list[torch.Tensor]:
        """The same tokens each time, and what the layers make of them."""
        found = []
        with self.ws.fork(*(part.main for part in self.parts)) as branch:
            for part in self.parts:
                with branch(part.main), self.ws.slot(micro_batch=part.index):
                    found.append(part.run())
        self.ws.synchronize()
        return found

    def close(self) -> None:
        for part in self.parts:
            if part.graph is not None:
                part.graph.release()


class Computing:
    """The layers of one micro-batch, on streams of its own."""

    def __init__(self, ws: Any, index: int, kind: type[After], seed: int) -> None:
        self.ws, self.index, self.lane, self.main = ws, index, f"graphs_{index}", ws.stream(f"main_{index}")
        self.layers = [kind(Weights(seed + place, CPU), ws, place, f"_{index}") for place in range(LAYERS)]
        self.x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed + index))
        self.turns = angles(TOKENS, CPU)
        self.hidden = ws.persistent(f"hidden_{index}", (TOKENS, HIDDEN), torch.float32)
        self.graph: Any = None

    def capture(self, broken: bool) -> None:
        with self.ws.slot(micro_batch=self.index), self.ws.on(self.main):
            with self.ws.capture(lane=self.lane) as capture:
                self.forward(capture.eager_break if broken else at_once)
        self.graph = capture.graph

    def forward(self, apart: Any) -> None:
        for layer in self.layers:
            layer.forward(self.hidden, self.turns, apart)

    def run(self) -> torch.Tensor:
        self.hidden.copy_(self.x)
        if self.graph is None:
            self.forward(at_once)
        else:
            self.graph.replay()
        return self.hidden.clone()
