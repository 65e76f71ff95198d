"""What prefill attends to: states gathered from paged caches, and each row's places among them.

vLLM: ``dequantize_and_gather_k_cache``, ``combine_topk_swa``.
"""

from __future__ import annotations

import torch

from dsv4.cache.pages import Format, pages_of
from dsv4.ops.argument import ANY, FLOAT, I32, U8, argument
from dsv4.ops.errors import OpError
from dsv4.ops.math import wide
from dsv4.ops.op import Op
from dsv4.ops.rules import INT32_MAX, Call, paged


def _gather_keys(
    cache: torch.Tensor,
    table: torch.Tensor,
    request: torch.Tensor,
    first: torch.Tensor,
    starts: torch.Tensor,
    rope: int,
    block_size: int,
    format: int,
    keys: torch.Tensor,
) -> None:
    """Consecutive states of some requests, dequantised, one request after the other.

    Parameters
    ----------
    cache, table
        See `dsv4.cache.pages`; int32 [R, B].
    request, first
        int32 [G]: row of the table, and the request's first state that is gathered.
    starts
        int32 [G+1]: request g's states fill rows starts[g] to starts[g+1] of keys.
    rope, block_size, format
        Rotated dims, states of a page, and a `Format`.

    Returns
    -------
    keys
        [M, D]; rows from starts[0] to starts[G] are written, the others left alone.
    """
    counts = (starts[1:] - starts[:-1]).long()
    if starts[0] < 0 or starts[-1] > len(keys) or (counts < 0).any():
        raise OpError(f"starts of gather_keys do not ascend from 0 to {len(keys)}", "pass where rows of keys begin")
    group = torch.repeat_interleave(counts)
    row = torch.arange(len(group), device=cache.device) + starts[0]
    state = row - starts[:-1].long()[group] + first.long()[group]
    pages = pages_of(Format(format), keys.shape[1], rope, block_size, cache.dtype)
    block = table[request.long()[group], state // block_size].long()
    keys[row] = pages.read(cache, block * block_size + state % block_size, wide(keys).dtype).to(keys.dtype)


def _combine_indices(
    positions: torch.Tensor,
    group: torch.Tensor,
    compressed_start: torch.Tensor,
    window_start: torch.Tensor,
    window_first: torch.Tensor,
    chosen: torch.Tensor | None,
    ratio: int,
    window: int,
    indices: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Rows of gathered keys that each prefill row attends to: compressed states, then its window.

    Parameters
    ----------
    positions
        int64 [T].
    group
        int32 [T], the row's request among the gathered ones.
    compressed_start, window_start
        int32 [G], first row of the request's compressed states and of its window keys.
    window_first
        int32 [G], position of that window key.
    chosen
        int32 [T, C], compressed states a C4 row attends to (ascending, then -1). None: all (position+1)//ratio.
    ratio, window
        Tokens of a compressed state (0: there are none), and of the window.

    Returns
    -------
    indices, lens
        int32 [T, K], -1 behind the used ones, and int32 [T]. K holds the most compressed states of a row + window.
    """
    owner = group.long()
    place = torch.arange(indices.shape[1], device=positions.device)[None]
    if chosen is not None:
        compressed = (chosen >= 0).sum(1)
        within = place.clamp(max=chosen.shape[1] - 1).expand(len(positions), -1)
        picked = chosen.gather(1, within) if chosen.shape[1] else place
    else:
        compressed = (positions + 1) // ratio if ratio else torch.zeros_like(positions)
        picked = place
    seen = (positions + 1).clamp(max=window)
    oldest = positions + 1 - seen - window_first[owner] + window_start[owner]
    late = place - compressed[:, None]
    found = torch.where(late < 0, compressed_start[owner, None] + picked, oldest[:, None] + late)
    lens.copy_(compressed + seen)
    indices.copy_(found.masked_fill(place >= lens[:, None], -1))


def _combine_rules(call: Call) -> None:
    ratio, window = call["ratio"], call["window"]
    call.require(0 <= ratio <= INT32_MAX, "ratio", f"is {ratio}", "pass a layer's, 0 without one")
    call.require(0 <= window <= INT32_MAX, "window", f"is {window}", "pass a number of tokens")


gather_keys = Op(
    "gather_keys(Tensor cache, Tensor table, Tensor request, Tensor first, Tensor starts, int rope, int block_size, "
    "int format, Tensor(a!) keys) -> ()",
    _gather_keys,
    inputs={
        "cache": argument(*ANY, dtype=(*FLOAT, U8)),
        "table": argument("R", "B", dtype=I32),
        "request": argument("G", dtype=I32),
        "first": argument("G", dtype=I32),
        "starts": argument("G+1", dtype=I32),
    },
    outs={"keys": argument("M", "D", partly=True)},
    rules=lambda call: paged(call, "cache", "block_size", call["keys"].shape[1], call["rope"]),
)
combine_indices = Op(
    "combine_indices(Tensor positions, Tensor group, Tensor compressed_start, Tensor window_start, "
    "Tensor window_first, Tensor? chosen, int ratio, int window, Tensor(a!) indices, Tensor(b!) lens) -> ()",
    _combine_indices,
    inputs={
        "positions": argument("T", dtype=torch.int64),
        "group": argument("T", dtype=I32),
        "compressed_start": argument("G", dtype=I32),
        "window_start": argument("G", dtype=I32),
        "window_first": argument("G", dtype=I32),
        "chosen": argument("T", "C", dtype=I32, optional=True),
    },
    outs={"indices": argument("T", "K", dtype=I32), "lens": argument("T", dtype=I32)},
    rules=_combine_rules,
)
