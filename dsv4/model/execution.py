"""Real numbers through a small model, a script of steps that is the same under every strategy and schedule.

The script crosses what there is to cross: prompts in chunks beside decode rows, groups of 4 that end in either and one
of 128 that ends in a decode row, a window that slides, more compressed keys than are chosen, steps padded to a bucket.
Its first steps feed known tokens, so that the host never waits and steps overlap as far as the edges allow; the last
ones feed what was generated.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4.cache.caches import Caches
from dsv4.cache.groups import groups_of
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.decoder import Outcome
from dsv4.model.precision import Precision
from dsv4.model.presets import TINY
from dsv4.model.random_weights import random_tensors
from dsv4.model.reserve import reserve
from dsv4.model.runner import Contexts, Runner
from dsv4.model.weights import Assembly
from dsv4.options import Options
from dsv4.scheduler import Rows
from dsv4.shard import Shard

ENGINE = Engine(max_num_batched_tokens=128, max_num_seqs=4, max_model_len=160)

SCRIPT = (
    ((0, 0, 100, True), (1, 0, 21, True)),
    ((1, 21, 1, False), (0, 100, 27, True), (2, 0, 9, True)),
    ((0, 127, 1, False), (1, 22, 1, False), (2, 9, 6, True)),
)
"""(request, start, count, prefill) of each step with known tokens."""

EXACT = Precision()

REQUESTS = tuple(dict.fromkeys(row[0] for step in SCRIPT for row in step))

GENERATED = 2
"""Steps behind them, each of a decode row for every request."""


class Execution:
    """A small model of random weights, to be run on workspaces.

    Parameters
    ----------
    config, precision
        The model.
    draft
        Whether the MTP block runs after each step.
    seed
        Of weights and prompts.
    device
        Where weights and caches live; the CPU's for simulated devices.
    """

    def __init__(
        self,
        config: ModelConfig = TINY,
        precision: Precision = EXACT,
        *,
        draft: bool = False,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.config, self.precision, self.draft, self.seed, self.device = config, precision, draft, seed, device
        self.shard = Shard(config, attention="flashinfer")
        assembly = Assembly(self.shard, precision, random_tensors(config, seed), device)
        self.weights = assembly.model()
        self.draft_weights = assembly.draft() if draft else None

    @property
    def description(self) -> str:
        """The model and the script in a line."""
        kinds = ", ".join(kind.name for kind in self.config.layer_kinds)
        tokens = sum(row[2] for step in SCRIPT for row in step) + GENERATED * len(REQUESTS)
        return (
            f"layers {kinds}, window {self.config.sliding_window}, top-{self.config.index_topk}; "
            f"{len(REQUESTS)} requests, {tokens} tokens in {len(SCRIPT) + GENERATED} steps"
        )

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Program:
        """The script on a workspace, in the mode and with the streams of `dsv4.options.Options`.

        The workspace is locked, as in a server: what was reserved is enough.
        """
        options = Options(mode=mode, aux_streams=aux_streams, micro_batches=micro_batches)
        reserve(ws, self.shard, self.precision, ENGINE, options, draft=self.draft)
        caches = [self._caches() for _ in range(micro_batches)]
        drafted = [self._caches(draft=True) for _ in range(micro_batches if self.draft else 0)]
        given = ws, self.shard, self.precision, ENGINE, self.weights, caches, options
        runner = Runner(*given, draft=self.draft_weights, draft_caches=drafted)
        ws.lock()
        return Program(self, runner)

    def context(self, request: int) -> Context:
        """A request with the tokens that are known of it: those the script feeds, and the one after."""
        generator = torch.Generator().manual_seed(1000 * self.seed + request)
        known = 1 + max(row[1] + row[2] for step in SCRIPT for row in step if row[0] == request)
        tokens = torch.randint(0, self.config.vocab_size, (known,), generator=generator).tolist()
        return Context(tokens, self.config.vocab_size, ENGINE.max_model_len)

    def _caches(self, draft: bool = False) -> Caches:
        groups = groups_of(self.config, draft)
        blocks = {one.name: ENGINE.max_num_seqs * (ENGINE.max_model_len // one.block_tokens + 1) for one in groups}
        return Caches(self.config, self.precision.storage, blocks, draft=draft, device=self.device)


class Program:
    """The script on one workspace; every run of it starts afresh and computes the same numbers."""

    def __init__(self, execution: Execution, runner: Runner) -> None:
        self._execution = execution
        self._runner = runner

    def run(self) -> list[torch.Tensor]:
        """Run the script; generated tokens, then the logits of each step, when the device is idle."""
        contexts = {request: self._execution.context(request) for request in REQUESTS}
        found: list[torch.Tensor] = []
        try:
            for script in SCRIPT:
                rows = [Rows(*one, True) for one in script]
                outcome = self._step(rows, contexts, found)
                self._draft(rows, contexts, outcome, found)
            tokens = self._generate(contexts, found)
        finally:
            for one in contexts.values():
                one.free()
        self._runner.ws.synchronize()
        return [torch.tensor(tokens), *found]

    def close(self) -> None:
        """Release the graphs."""
        self._runner.close()

    def _generate(self, contexts: Contexts, found: list[torch.Tensor]) -> list[int]:
        tokens: list[int] = []
        for _ in range(GENERATED):
            rows = [Rows(request, len(one.tokens) - 1, 1, False, True) for request, one in contexts.items()]
            outcome = self._step(rows, contexts, found)
            chosen = found[-1].argmax(1).tolist()
            tokens += chosen
            for one, token in zip(contexts.values(), chosen, strict=True):
                one.append([token])
            self._draft(rows, contexts, outcome, found)
        return tokens

    def _step(self, rows: list[Rows], contexts: Contexts, found: list[torch.Tensor]) -> Outcome:
        outcome = self._runner.forward(rows, contexts)
        found.append(self._runner.logits(outcome.hidden[list(outcome.sampled)]))
        return outcome

    def _draft(self, rows: list[Rows], contexts: Contexts, outcome: Outcome, found: list[torch.Tensor]) -> None:
        if self._execution.draft:
            drafted = self._runner.draft(rows, contexts, outcome.residual)
            found.append(self._runner.logits(drafted.hidden[list(drafted.sampled)]))
