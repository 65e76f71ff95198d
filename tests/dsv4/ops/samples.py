"""Small arguments of every op, by name: inputs in the schema's order, and how many rows they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4 import ops
from dsv4.cache.pages import Format, States, pages_of
from dsv4.config import LayerKind
from dsv4.model.presets import MIXED
from dsv4.ops import Op
from dsv4.ops.rope import table

T, HEADS, PADDED, WIDTH, ROPE, HIDDEN, STREAMS = 7, 4, 8, 128, 64, 32, 4
EPS = 1e-6

OPS: dict[str, Op] = {name: one for name in ops.__all__ if isinstance(one := getattr(ops, name), Op)}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def cos_sin(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return table(MIXED, LayerKind.C4, 512, dtype)


def positions(count: int = T) -> torch.Tensor:
    return torch.arange(count) * 37 % 300


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(layout: Format = Format.FP8_DS_MLA, width: int = WIDTH, block: int = 4, blocks: int = 8) -> torch.Tensor:
    """A cache with every state written."""
    pages = pages_of(layout, width, ROPE, block)
    cache = pages.allocate(blocks)
    pages.write(cache, torch.arange(blocks * block), noise(blocks * block, width, seed=3))
    return cache


SLOTS = torch.tensor([3, -1, 31, 0, 17, -1, 8])
REQUESTS = ints(0, 0, 1, 1, 1, 2, 2)
TABLE = torch.randperm(8, generator=torch.Generator().manual_seed(2)).to(torch.int32).view(4, 2)


def states(width: int, rows: int = 4, blocks: int = 96, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = States(width, rows, dtype).allocate(blocks)
    made.copy_(noise(blocks, rows, width, seed=4, dtype=dtype))
    return made


STATE_TABLE = torch.arange(3 * 32, dtype=torch.int32).flip(0).view(3, 32)
"""Blocks of three requests of up to 128 tokens in blocks of 4 rows."""
ENDS = torch.tensor([3, 5, 7, 11, 12, 15, 127])
"""Positions, most of them the last of a group of 4."""
ENDING = torch.where((ENDS + 1) % 4 == 0, torch.arange(T) * 4, -1)


def _mixing(dtype: torch.dtype) -> tuple[Any, ...]:
    rows = (2 + STREAMS) * STREAMS
    fn, base = noise(rows, STREAMS * HIDDEN, seed=5) / 11, noise(rows, seed=6)
    return fn, base, noise(3, seed=7), noise(HIDDEN, seed=8), EPS, EPS, 20


def _streams(dtype: torch.dtype) -> tuple[Any, ...]:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    comb = noise(T, STREAMS, STREAMS, seed=10, dtype=wide).softmax(2)
    return noise(T, STREAMS, HIDDEN, dtype=dtype), noise(T, STREAMS, seed=9, dtype=wide), comb


def _indexer_q(dtype: torch.dtype) -> tuple[Any, ...]:
    return noise(T, 16, 128, dtype=dtype), noise(T, 16, seed=1, dtype=dtype), positions(), cos_sin(), 0.022


def _decode(dtype: torch.dtype) -> tuple[Any, ...]:
    window = torch.stack([torch.randperm(32)[:6] for _ in range(T)]).to(torch.int32)
    extra = window.flip(0).flip(1)[:, :5].contiguous()
    lens, more = ints(1, 2, 3, 4, 5, 6, 6), ints(0, 5, 2, 1, 0, 3, 4)
    cache = packed()
    sink = noise(PADDED, seed=2)
    sink[HEADS:] = float("-inf")
    return (noise(T, PADDED, WIDTH, dtype=dtype), cache, window, lens, packed(), extra, more, sink, WIDTH**-0.5,
            ROPE, 4, 4, int(Format.FP8_DS_MLA))  # fmt: skip


def _prefill(dtype: torch.dtype) -> tuple[Any, ...]:
    indices = torch.stack([torch.randperm(20)[:9] for _ in range(T)]).to(torch.int32)
    lens = ints(1, 9, 3, 0, 5, 6, 8)
    return (
        noise(T, PADDED, WIDTH, dtype=dtype),
        noise(20, WIDTH, seed=1, dtype=dtype),
        indices,
        lens,
        noise(PADDED, seed=2),
        0.1,
    )


def _logits(dtype: torch.dtype) -> tuple[Any, ...]:
    cache = packed(Format.INDEXER_FP8, 128)
    q = noise(T, 16, 128, dtype=dtype)
    return q, None, noise(T, 16, seed=1), cache, TABLE, REQUESTS, ints(3, 4, 5, 6, 8, 0, 7), 4, int(Format.INDEXER_FP8)


def _compress(dtype: torch.dtype) -> tuple[Any, ...]:
    cache = pages_of(Format.FP8_DS_MLA, WIDTH, ROPE, 4).allocate(8)
    return (states(4 * WIDTH), STATE_TABLE, ENDS, REQUESTS, ENDING, noise(WIDTH, seed=8), cos_sin(), cache, 4, True,
            EPS, 4, int(Format.FP8_DS_MLA))  # fmt: skip


INPUTS: dict[str, Callable[[torch.dtype], tuple[Any, ...]]] = {
    "q_kv_rmsnorm": lambda dtype: (noise(T, 48, dtype=dtype), noise(32, seed=1), noise(16, seed=1), EPS),
    "rms_norm": lambda dtype: (noise(T, HIDDEN, dtype=dtype), noise(HIDDEN, seed=1), EPS),
    "q_norm_rope_kv_insert": lambda dtype: (
        noise(T, HEADS, WIDTH, dtype=dtype), noise(T, WIDTH, seed=1, dtype=dtype), packed(), SLOTS, positions(),
        cos_sin(), EPS, 4, int(Format.FP8_DS_MLA),
    ),
    "indexer_q_rope": _indexer_q,
    "indexer_q_rope_fp8": _indexer_q,
    "indexer_q_rope_fp4": _indexer_q,
    "save_partial_states": lambda dtype: (
        noise(T, 256, dtype=dtype), noise(4, 128, seed=1), ENDS, torch.tensor([0, 9, -1, 4, 30, 17, 2]),
        states(256, dtype=torch.float64 if dtype is torch.float64 else torch.float32),
    ),
    "pool_states": lambda dtype: (
        states(4 * WIDTH, dtype=torch.float64 if dtype is torch.float64 else torch.float32),
        STATE_TABLE, ENDS, REQUESTS, ENDING, 4, True,
    ),
    "store_compressed": lambda dtype: (
        noise(T, WIDTH), noise(WIDTH, seed=8), cos_sin(), ENDS, ENDING, packed(), 4, EPS, 4, int(Format.FP8_DS_MLA),
    ),
    "compress": _compress,
    "indexer_logits": _logits,
    "indexer_top_k": lambda dtype: (noise(T, 12), ints(0, 1, 5, 6, 11, 12, 12)),
    "global_top_k": lambda dtype: (
        torch.stack([torch.arange(5) for _ in range(T)]).to(torch.int32).masked_fill_(torch.arange(5) > 3, -1),
        REQUESTS, TABLE, torch.arange(T) < T - 1, 4,
    ),
    "sparse_attention_decode": _decode,
    "sparse_attention_prefill": _prefill,
    "gather_keys": lambda dtype: (packed(), TABLE, ints(2, 0), ints(1, 3), ints(2, 6, 9), ROPE, 4, 1),
    "combine_indices": lambda dtype: (
        torch.tensor([5, 6, 7, 20, 21, 22, 23]), ints(0, 0, 0, 1, 1, 1, 1), ints(0, 2), ints(8, 16), ints(0, 13), None,
        4, 8,
    ),
    "inverse_rope": lambda dtype: (noise(T, PADDED, WIDTH, dtype=dtype), positions(), cos_sin(), HEADS),
    "inverse_rope_fp8": lambda dtype: (noise(T, PADDED, WIDTH, dtype=dtype), positions(), cos_sin(), HEADS),
    "mhc_pre": lambda dtype: (noise(T, STREAMS, HIDDEN, dtype=dtype), *_mixing(dtype)),
    "mhc_post": lambda dtype: (*_streams(dtype), noise(T, HIDDEN, seed=11, dtype=dtype)),
    "mhc_post_pre": lambda dtype: (*_streams(dtype), noise(T, HIDDEN, seed=11, dtype=dtype), *_mixing(dtype)),
    "hc_head": lambda dtype: (
        noise(T, STREAMS, HIDDEN, dtype=dtype), noise(STREAMS, STREAMS * HIDDEN, seed=1), noise(STREAMS, seed=2),
        noise(1, seed=3), noise(HIDDEN, seed=4), EPS, EPS,
    ),
    "route": lambda dtype: (noise(T, 8, dtype=dtype), noise(8, seed=1), None, torch.arange(T), 1.5),
    "swiglu": lambda dtype: (3 * noise(T, 20, dtype=dtype), 2.0),
    "routed_experts": lambda dtype: (
        noise(T, HIDDEN, dtype=dtype),
        torch.stack([torch.randperm(5)[:3] for _ in range(T)]).to(torch.int32),
        noise(T, 3, seed=1, dtype=torch.float64 if dtype is torch.float64 else torch.float32),
        noise(5, 24, HIDDEN, seed=2), noise(5, HIDDEN, 12, seed=3), 2.0,
    ),
}  # fmt: skip

DIMS: dict[str, dict[str, int]] = {
    "q_norm_rope_kv_insert": {"P": PADDED},
    "pool_states": {"D": WIDTH},
    "indexer_logits": {"S": 8},
    "indexer_top_k": {"K": 6},
    "sparse_attention_decode": {"S": 0},
    "gather_keys": {"M": 12, "D": WIDTH},
    "combine_indices": {"K": 16},
    "inverse_rope": {"G": 2, "N": HEADS // 2 * WIDTH},
    "inverse_rope_fp8": {"G": 2, "N": HEADS // 2 * WIDTH},
    "route": {"K": 3},
}
"""Dims that outs have and inputs do not tell."""


def sample(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The same arguments at each call, every tensor anew."""
    torch.manual_seed(0)
    return INPUTS[name](dtype)


def outs(name: str, inputs: tuple[Any, ...], fill: float = 0.0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outs and scratch of a call, filled with one value."""
    op = OPS[name]
    given = {key: inputs[place] for place, key, _ in op._places}
    like, dims = op._bind(given, [None] * (len(op.outs) + len(op.scratch)))
    made = []
    for spec in op.specs(like, **(DIMS.get(name, {}) | dims)).values():
        tensor = torch.empty(spec.resolve({})[0], dtype=spec.dtype)
        made.append(tensor.fill_(fill if tensor.is_floating_point() else 77))
    return made[: len(op.outs)], made[len(op.outs) :]
