"""Steps of a model at its own attention shapes on a GPU, for the sweep: many strategies on one set of weights."""

from __future__ import annotations

from typing import Any

import attrs

from dsv4.cache.caches import Caches
from dsv4.cache.groups import groups_of
from dsv4.config import reduced
from dsv4.configfile import resolve
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.precision import SERVED
from dsv4.model.random_weights import RandomTensors
from dsv4.model.reserve import reserve
from dsv4.model.runner import Runner
from dsv4.model.timed_trace import ENGINE, Loaded, Sessions, load_of
from dsv4.model.weights import Assembly
from dsv4.options import Options
from dsv4.scheduler import Rows
from dsv4.shard import Shard

CONTEXT = 8192
DECODED = 64
"""Steps of so many tokens and less are decode rows at a context of `CONTEXT`; larger ones are two prompts, whole."""

EXPERTS, INNER = 8, 512
"""Routed experts, and their inner size: in bfloat16 as many bytes as one of Flash's 2,048 in FP4."""

AT_ONCE = 64
"""Positions by which a context takes its blocks, so that it never holds more than its window needs."""


class Timed:
    """A model, whole but for its experts, with random weights; see `workspace.sweep.workload.Timed`.

    Parameters
    ----------
    model
        Preset or config file.
    layers
        The first so many; None: all.
    """

    def __init__(self, model: str, seed: int, device: str, layers: int | None = None, config: Any = None) -> None:
        if config is None:
            config = attrs.evolve(reduced(resolve(model), layers, EXPERTS), moe_intermediate_size=INNER)
        self.shard = Shard(config, attention="flashinfer")
        self.device = device
        tensors = RandomTensors(config, seed, device=device)
        self._weights = Assembly(self.shard, SERVED, tensors, device).model()
        self._seed, self._sessions = seed, dict[int, Sessions]()
        self._held: dict[tuple[int, int], tuple[Engine, list[Rows], dict[int, Context], list[Caches]]] = {}
        self.description = (
            f"DeepSeek-V4 {model}: {config.num_hidden_layers} layers, {config.n_routed_experts} experts of "
            f"{config.moe_intermediate_size}; up to {DECODED} tokens: decode rows at a context of {CONTEXT}, more: "
            "two prompts"
        )

    def prepare(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int, tokens: int) -> Steps:
        """Ready to run steps of so many tokens, always the same one."""
        held = self._held.get((micro_batches, tokens))
        if held is None:
            self._held.clear()  # one setting's caches at a time
            self._sessions.clear()
            held = self._held[micro_batches, tokens] = self._requests(micro_batches, tokens)
        engine, rows, contexts, caches = held
        options = Options(mode=mode, aux_streams=aux_streams, micro_batches=micro_batches)
        reserve(ws, self.shard, SERVED, engine, options)
        return Steps(Runner(ws, self.shard, SERVED, engine, self._weights, caches, options), rows, contexts)

    def load(self, ws: Any, mode: str, aux_streams: bool, micro_batches: int) -> Loaded:
        """Ready to run the steps of a trace."""
        self._held.clear()
        if micro_batches not in self._sessions:
            self._sessions = {
                micro_batches: Sessions(self.shard.config, load_of(self._seed), micro_batches, self.device)
            }
        sessions = self._sessions[micro_batches]
        options = Options(mode=mode, aux_streams=aux_streams, micro_batches=micro_batches)
        reserve(ws, self.shard, SERVED, ENGINE, options)
        given = ws, self.shard, SERVED, ENGINE, self._weights, sessions.caches, options
        return Loaded(sessions, Runner(*given))

    def differs(self, mode: str, tokens: int) -> bool:
        """Whether a graph takes such a step, or the mode has none; of the trace's steps (0) some always."""
        if not tokens:
            return True
        sizes = Options(mode=mode).sizes(_engine(tokens))
        return mode == "eager" or (bool(sizes) and tokens <= sizes[-1] and (mode != "full" or tokens <= DECODED))

    def _requests(self, micro_batches: int, tokens: int) -> tuple[Engine, list[Rows], dict[int, Context], list[Caches]]:
        config = self.shard.config
        decoding = tokens <= DECODED
        count = tokens if decoding else 2
        length = CONTEXT if decoding else -(-tokens // 2)
        engine = _engine(tokens)
        each = AT_ONCE if decoding else length
        share = -(-count // micro_batches)
        blocks = {one.name: one.most_blocks(length, share * each, share) + share for one in groups_of(config)}
        caches = [Caches(config, SERVED.storage, blocks, device=self.device) for _ in range(micro_batches)]
        contexts = {
            index: Context([index % config.vocab_size] * length, config.vocab_size, length) for index in range(count)
        }
        rows = []
        for index, context in contexts.items():
            own = context.blocks_of(caches[index % micro_batches])
            for start in range(0, length, each):
                own.extend(start, min(start + each, length))
            if decoding:
                rows.append(Rows(index, length - 1, 1, False, True))
            else:
                rows.append(Rows(index, 0, length if index else tokens - length, True, True))
        return engine, rows, contexts, caches


def _engine(tokens: int) -> Engine:
    """Limits for steps of so many tokens."""
    if tokens <= DECODED:
        return Engine(tokens, tokens, CONTEXT + 256)
    return Engine(tokens, 2, max(-(-tokens // 2), CONTEXT) + 256)


class Steps:
    """One step, to be run again and again."""

    def __init__(self, runner: Runner, rows: list[Rows], contexts: dict[int, Context]) -> None:
        self._runner, self._rows, self._contexts = runner, rows, contexts

    def run(self) -> None:
        """Enqueue the step."""
        self._runner.forward(self._rows, self._contexts)

    def close(self) -> None:
        """Release the graphs."""
        self._runner.close()
