"""A tiny real model, as it is deployed, and what it generates alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs

from dsv4.engine import Engine
from dsv4.model.presets import TINY
from dsv4.serve.build import BUILT_IN, Deployment, ModelOptions, deployed
from dsv4.serve.sampling import Sampling
from dsv4.serve.server import Server

ENGINE = Engine(max_num_batched_tokens=160, max_num_seqs=4, max_model_len=300)
OPTIONS = ModelOptions(model="tiny", strategy="event_fenced", engine=ENGINE)


@contextmanager
def tiny(**changed: Any) -> Iterator[Deployment]:
    """The model of `OPTIONS` with some changed; it leaves no lease and no block behind."""
    with mock.patch.dict(BUILT_IN, {"tiny": TINY}), deployed(attrs.evolve(OPTIONS, **changed)) as one:
        yield one
        assert one.workspace.snapshot().allocated == 0
        for caches in one.caches:
            assert all(group.free_blocks == group.blocks for group in caches.allocators.values())


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(TINY.vocab_size) for _ in range(length)]


def generated(one: Deployment, tokens: list[int], count: int) -> list[int]:
    """What plain greedy decoding gives, on a server of its own."""
    server = Server(one.model)
    return list(server.stream(server.submit(tokens, Sampling(max_new_tokens=count))))
