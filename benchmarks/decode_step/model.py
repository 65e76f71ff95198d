"""The model that is measured, its requests at a context of 8,192 tokens, and a runner for each strategy and mode."""

from __future__ import annotations

from typing import Any

import attrs
import torch

import workspace
from benchmarks.decode_step.bare import Bare
from dsv4.cache.caches import Caches
from dsv4.cache.groups import groups_of
from dsv4.config import ModelConfig, reduced
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.precision import SERVED
from dsv4.model.random_weights import RandomTensors
from dsv4.model.reserve import reserve
from dsv4.model.runner import Runner
from dsv4.model.weights import Assembly
from dsv4.options import Options
from dsv4.presets import FLASH
from dsv4.scheduler import Rows
from dsv4.shard import Shard

CONTEXT = 8192
SEQUENCES = 2
ENGINE = Engine(max_num_batched_tokens=2048, max_num_seqs=8, max_model_len=CONTEXT + 256)
EXPERTS, INNER = 8, 512
"""Routed experts, and their inner size: in bfloat16 as many bytes as one of Flash's 2,048 in FP4."""

BASELINE = "upstream, bare"
IDIOM = "upstream, bare, usual stream idiom"
SAFE = ("caching", "event_fenced", "per_stream")


def flash(layers: int = FLASH.num_hidden_layers) -> ModelConfig:
    """Flash with its attention as it is, and experts that fit."""
    return attrs.evolve(reduced(FLASH, layers, EXPERTS), moe_intermediate_size=INNER)


@attrs.define(eq=False)
class Bench:
    """Weights, caches and two requests that every runner shares: they take turns, and each step writes what it found.

    Attributes
    ----------
    base
        Bytes allocated before the first workspace.
    """

    config: ModelConfig = attrs.field(factory=flash)
    engine: Engine = ENGINE
    device: str = "cuda"
    shard: Shard = attrs.field(init=False)
    weights: Any = attrs.field(init=False)
    caches: Caches = attrs.field(init=False)
    contexts: dict[int, Context] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.shard = Shard(self.config, attention="flashinfer")
        tensors = RandomTensors(self.config, 0, device=self.device)
        self.weights = Assembly(self.shard, SERVED, tensors, self.device).model()
        blocks = {
            one.name: SEQUENCES * (-(-self.engine.max_model_len // one.block_tokens)) for one in groups_of(self.config)
        }
        self.caches = Caches(self.config, SERVED.storage, blocks, device=self.device)
        generator = torch.Generator().manual_seed(1)
        longest = self.engine.max_model_len
        tokens = torch.randint(self.config.vocab_size, (SEQUENCES, longest), generator=generator).tolist()
        self.contexts = {index: Context(own, self.config.vocab_size, longest) for index, own in enumerate(tokens)}

    def runner(self, name: str, mode: str = "eager") -> tuple[Any, Runner]:
        """A workspace of its own under a strategy, or under a form of the baseline, and a runner on it."""
        strategy = "upstream" if name.startswith("upstream") else name
        ws: Any = workspace.create(strategy, device=self.device, allow_unsafe=strategy not in SAFE, statistics=False)
        if name in (BASELINE, IDIOM):
            ws = Bare(ws, idiom=name == IDIOM)
        options = Options(mode=mode)
        reserve(ws, self.shard, SERVED, self.engine, options)
        return ws, Runner(ws, self.shard, SERVED, self.engine, self.weights, [self.caches], options)

    def fill(self, runner: Runner, until: int = CONTEXT - 1) -> None:
        """Prefill the requests up to the token that decode steps feed."""
        chunk = self.engine.max_num_batched_tokens
        for index in self.contexts:
            for start in range(0, until, chunk):
                rows = [Rows(index, start, min(chunk, until - start), True, True)]
                runner.forward(rows, self.contexts)

    def step(self, runner: Runner, at: int = CONTEXT - 1) -> Any:
        """One decode step: a token of each request, always at the same place."""
        return runner.forward([Rows(index, at, 1, False, True) for index in self.contexts], self.contexts)
