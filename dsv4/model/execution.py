"""Real numbers through a small model, a script of steps that is the same under every strategy and schedule.

The script crosses what there is to cross: prompts in chunks beside decode rows, groups of 4 and of 128 that end in a
prompt and at a generated token, a window that slides, more compressed keys than are chosen, steps that pad to a bucket.
Its first steps feed known tokens, so that the host never waits and steps overlap as far as the edges allow; the last
ones feed what was generated.
"""

from __future__ import annotations

from typing import Any

import attrs
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

SEEN = tuple(dict.fromkeys(row[0] for step in SCRIPT for row in step))

GENERATED = 2
"""Steps behind them, each of a decode row for every request."""


@attrs.frozen(eq=False)
class Execution:
    """A small model of random weights and its script.

    Attributes
    ----------
    config
        The model.
    draft
        Whether the MTP block runs after each step.
    seed
        Of weights and prompts.
    """

    config: ModelConfig = TINY
    draft: bool = False
    seed: int = 0
    precision: Precision = Precision()
    shard: Shard = attrs.field(init=False)
    weights: Any = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        shard = Shard(self.config, attention="flashinfer")
        assembly = Assembly(shard, self.precision, random_tensors(self.config, self.seed))
        object.__setattr__(self, "shard", shard)
        object.__setattr__(self, "weights", (assembly.model(), assembly.draft() if self.draft else None))

    @property
    def description(self) -> str:
        kinds = ", ".join(kind.name for kind in self.config.layer_kinds)
        tokens = sum(row[2] for step in SCRIPT for row in step) + GENERATED * len(SCRIPT[-1])
        return f"{kinds}; {len(SCRIPT) + GENERATED} steps, {tokens} tokens, window {self.config.sliding_window}, " + (
            f"top-{self.config.index_topk}"
        )

    def run(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> list[torch.Tensor]:
        """Run the script on a workspace; generated tokens and all logits, when the device is idle.

        Parameters
        ----------
        mode, aux_streams, micro_batches
            As in `dsv4.options.Options`.
        """
        options = Options(mode=mode, aux_streams=aux_streams, micro_batches=micro_batches)
        model, draft = self.weights
        reserve(ws, self.shard, self.precision, ENGINE, options, draft=self.draft)
        caches = [self._caches() for _ in range(micro_batches)]
        drafted = [self._caches(draft=True) for _ in range(micro_batches if self.draft else 0)]
        given = ws, self.shard, self.precision, ENGINE, model, caches, options
        runner = Runner(*given, draft=draft, draft_caches=drafted)
        try:
            found = self._steps(runner)
        finally:
            ws.synchronize()
            runner.close()
        return found

    def _steps(self, runner: Runner) -> list[torch.Tensor]:
        fed = {
            request: max(row[1] + row[2] for step in SCRIPT for row in step if row[0] == request) for request in SEEN
        }
        contexts = {request: self._context(request, count + 1) for request, count in fed.items()}
        found: list[torch.Tensor] = []
        for script in SCRIPT:
            rows = [Rows(*one, True) for one in script]
            outcome = self._forward(runner, rows, contexts, found)
            self._draft(runner, rows, contexts, outcome, found)
        tokens: list[int] = []
        for _ in range(GENERATED):
            rows = [Rows(request, len(one.tokens) - 1, 1, False, True) for request, one in contexts.items()]
            outcome = self._forward(runner, rows, contexts, found)
            chosen = found[-1].argmax(1).tolist()
            tokens += chosen
            for one, token in zip(contexts.values(), chosen, strict=True):
                one.append([token])
            self._draft(runner, rows, contexts, outcome, found)
        for one in contexts.values():
            one.free()
        return [torch.tensor(tokens), *found]

    def _forward(self, runner: Runner, rows: list[Rows], contexts: Contexts, found: list[torch.Tensor]) -> Outcome:
        outcome = runner.forward(rows, contexts)
        found.append(runner.logits(outcome.hidden[list(outcome.sampled)]))
        return outcome

    def _draft(
        self, runner: Runner, rows: list[Rows], contexts: Contexts, outcome: Outcome, found: list[torch.Tensor]
    ) -> None:
        if self.draft:
            drafted = runner.draft(rows, contexts, outcome.residual)
            found.append(runner.logits(drafted.hidden[list(drafted.sampled)]))

    def _context(self, request: int, tokens: int) -> Context:
        generator = torch.Generator().manual_seed(1000 * self.seed + request)
        known = torch.randint(0, self.config.vocab_size, (tokens,), generator=generator).tolist()
        return Context(known, self.config.vocab_size, ENGINE.max_model_len)

    def _caches(self, draft: bool = False) -> Caches:
        groups = groups_of(self.config, draft)
        blocks = {one.name: ENGINE.max_num_seqs * (ENGINE.max_model_len // one.block_tokens + 1) for one in groups}
        return Caches(self.config, self.precision.storage, blocks, draft=draft)
