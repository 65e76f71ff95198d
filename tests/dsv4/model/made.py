"""Models, requests and steps for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch

import workspace
from dsv4.cache.caches import Caches
from dsv4.cache.groups import groups_of
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.decoder import Decoder, Outcome
from dsv4.model.precision import Precision
from dsv4.model.random_weights import random_tensors
from dsv4.model.weights import Assembly
from dsv4.scheduler import Rows
from dsv4.shard import Shard

EXACT = Precision()
ENGINE = Engine(max_num_batched_tokens=1024, max_num_seqs=8, max_model_len=1024)


def blocks_for(config: ModelConfig, tokens: int, draft: bool = False) -> dict[str, int]:
    """Blocks for contexts of that many tokens in all, nothing trimmed."""
    return {group.name: -(-tokens // group.block_tokens) + 8 for group in groups_of(config, draft)}


def decoder(
    config: ModelConfig,
    *,
    ws: Any = None,
    seed: int = 0,
    precision: Precision = EXACT,
    tensors: Any = None,
    aux_streams: bool = True,
    capacity: int = 2048,
    engine: Engine = ENGINE,
) -> Decoder:
    """A decoder of random weights with caches for `capacity` tokens."""
    shard = Shard(config, attention="flashinfer")
    tensors = tensors or random_tensors(config, seed)
    weights = Assembly(shard, precision, tensors).model()
    caches = Caches(config, precision.storage, blocks_for(config, capacity))
    ws = ws or workspace.create("event_fenced", device="cpu")
    return Decoder(ws, shard, precision, engine, weights, caches, aux_streams=aux_streams)


def prompt(config: ModelConfig, length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()


def context(model: Decoder, tokens: list[int]) -> Context:
    return Context(tokens, model.shard.config.vocab_size, model.engine.max_model_len)


def step(model: Decoder, contexts: dict[int, Context], *parts: tuple[int, int, int, bool]) -> tuple[Outcome, Any]:
    """One forward pass of (request, start, count, prefill) rows on the model's main stream, and all rows' logits."""
    rows = [Rows(request, start, count, prefill, True) for request, start, count, prefill in parts]
    model.ws.synchronize()  # weights and caches were made on the default stream
    with model.ws.on(model.main):
        found = model.forward(rows, contexts)
        logits = model.logits(found.hidden)
    model.ws.synchronize()
    return found, logits


def full_prefill(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of one prompt in one step; its blocks are given back."""
    one = context(model, tokens)
    logits = step(model, {0: one}, (0, 0, len(tokens), True))[1]
    one.free()
    return logits
