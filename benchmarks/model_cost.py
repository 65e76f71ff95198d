"""What a prefill costs in this package's reference kernels: float32, one request in one step, small presets.

The time target is of four layers of every kind on two threads, by the wall clock. Exponents are slopes of the logarithm
of a cost over that of the size, in two layers of one kind on one thread, each size in a process of its own: CPU time
(the least of three prefills), resident bytes (the peak of a prefill, above what the process held before) and
bytes on lease. SWA and C128 layers are held against tokens. C4 layers are held against tokens x top-k, the keys that
their attention reads; their indexer scores all of a prompt's compressed keys to choose these, a part that grows with
the square of the tokens, so that their exponent in tokens alone is shown, too.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import attrs
import torch

import workspace
from benchmarks.figure import Figure
from dsv4.cache.caches import Caches
from dsv4.cache.groups import groups_of
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.decoder import Decoder
from dsv4.model.precision import Precision
from dsv4.model.presets import MIXED, of_ratio
from dsv4.model.random_weights import random_tensors
from dsv4.model.weights import Assembly
from dsv4.scheduler import Rows
from dsv4.shard import Shard

PREFILL, THREADS = 2048, 2
WARM_UP = 128
TOKENS = (512, 1024, 2048, 4096)
TOP_K = (32, 64, 128)
REPEATS = 3
EXPONENT = 1.15
MIB = 1 << 20
M_MMAP_THRESHOLD = -3
"""mallopt's parameter (malloc.h): from how many bytes on memory is mapped, and unmapped as soon as it is freed."""


@attrs.frozen
class Cost:
    """Of one prefill: seconds; bytes the process grew by; bytes on lease."""

    seconds: float
    resident: int
    leased: int


def figures() -> list[Figure]:
    """All figures of this benchmark."""
    whole = apart(prefill_cost, MIXED, PREFILL, THREADS, time.perf_counter)
    found = [
        Figure(f"four layers: prefill of {PREFILL:,} tokens on {THREADS} threads", whole.seconds, "s", 20.0),
        Figure("four layers: resident", whole.resident / MIB, "MiB"),
        Figure("four layers: on lease", whole.leased / MIB, "MiB"),
    ]
    for name, ratio in (("SWA", 0), ("C128", 128)):
        costs = [apart(prefill_cost, of_ratio(ratio), tokens) for tokens in TOKENS]
        found += _exponents(f"{name}: %s, exponent in tokens", TOKENS, costs, EXPONENT)
    return found + _of_c4()


def _of_c4() -> list[Figure]:
    costs = {
        (tokens, top_k): apart(prefill_cost, attrs.evolve(of_ratio(4), index_topk=top_k), tokens)
        for tokens in TOKENS
        for top_k in TOP_K
    }
    read = [tokens * top_k for tokens, top_k in costs]
    found = _exponents("C4: %s, exponent in tokens x top-k", read, list(costs.values()), EXPONENT)
    for top_k in TOP_K:
        alone = [costs[tokens, top_k] for tokens in TOKENS]
        found += _exponents(f"C4, top-k {top_k}: %s, exponent in tokens", TOKENS, alone)
    return found


def _exponents(name: str, sizes: Sequence[int], costs: Sequence[Cost], limit: float | None = None) -> list[Figure]:
    found = []
    for what in ("seconds", "resident", "leased"):
        values = [getattr(cost, what) for cost in costs]
        found.append(Figure(name % what, exponent(sizes, values), "power", limit))
    return found


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The power of the size that the values follow: the least-squares slope of their logarithms."""
    logs = [torch.tensor(list(one), dtype=torch.float64).log().tolist() for one in (sizes, values)]
    return linear_regression(*logs).slope


def apart(call: Callable[..., Cost], *args: Any) -> Cost:
    """A call in a process of its own, whose peak of memory is that call's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, args)


def prefill_cost(
    config: ModelConfig, tokens: int, threads: int = 1, clock: Callable[[], float] = time.process_time
) -> Cost:
    """Of a prompt in one step, with random weights; sets the process's threads."""
    torch.set_num_threads(threads)
    model = _decoder(config, tokens)
    _prefill(model, WARM_UP)  # the first call of an operator loads its kernels
    resident = _resident(lambda: _prefill(model, tokens))
    seconds = []
    for _ in range(REPEATS):
        began = clock()
        _prefill(model, tokens)
        seconds.append(clock() - began)
    return Cost(min(seconds), resident, model.ws.snapshot().peak_allocated)


def _resident(body: Callable[[], None]) -> int:
    """Bytes by which the process grows at the most; what malloc keeps back of freed memory does not blur them."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, 1 << 16)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    body()
    peak = _status("VmHWM")
    mallopt(M_MMAP_THRESHOLD, 32 << 20)
    return peak - before


def _decoder(config: ModelConfig, tokens: int) -> Decoder:
    shard, precision = Shard(config, attention="flashinfer"), Precision()
    engine = Engine(max_num_batched_tokens=tokens, max_num_seqs=1, max_model_len=tokens)
    weights = Assembly(shard, precision, random_tensors(config, 0)).model()
    blocks = {group.name: -(-tokens // group.block_tokens) for group in groups_of(config)}
    ws = workspace.create("event_fenced", device="cpu", statistics=True)
    return Decoder(ws, shard, precision, engine, weights, Caches(config, precision.storage, blocks))


def _prefill(model: Decoder, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.shard.config.vocab_size
    prompt = torch.randint(0, vocabulary, (tokens,), generator=generator).tolist()
    context = Context(prompt, vocabulary, tokens)
    with model.ws.on(model.main):
        model.forward([Rows(0, 0, tokens, True, True)], {0: context})
    context.free()


def _status(field: str) -> int:
    """A figure of the process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
