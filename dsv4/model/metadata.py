"""What every layer of a step reads about its rows: positions, slots, tables, and the keys each row attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dsv4.cache.caches import Caches
from dsv4.cache.groups import C4_STATE, C128_STATE, COMPRESSED, COMPRESSED_BLOCK, SWA, SWA_BLOCK, Group
from dsv4.config import RATIO, LayerKind
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.gather import Gather, gathers
from dsv4.scheduler import Rows

I32, I64 = np.int32, np.int64

STATES = {LayerKind.C4: (C4_STATE, 4), LayerKind.C128: (C128_STATE, 8)}
"""Group and rows of a block of each kind's compressor states."""


@attrs.frozen(eq=False)
class Listed:
    """Slots each decode row attends to: int32 [Td, K] and how many count, int32 [Td]."""

    slots: Any
    lens: Any


@attrs.frozen(eq=False)
class Metadata:
    """A step's rows: decode rows first, then prefill rows, then padding.

    Made of NumPy arrays by `metadata`, and of tensors by `dsv4.model.upload`. What a captured graph reads comes first:
    its place in the upload depends on the padding only. The rest is read by eager regions.

    Attributes
    ----------
    tokens, positions
        int64 [T].
    request
        int32 [T], row of the block tables.
    valid
        bool [T], False for padding.
    candidates
        int32 [T], compressed keys (4 to 1) a row may attend to: (position+1)//4.
    tables
        int32 [R, B] by cache group.
    window_slots
        int64 [T], where a row's key goes; -1 for padding, here and below.
    state_slots, compressed_slots
        int64 [T] by kind of layer: where a row's compressor state goes, and the state its group makes if it ends one.
    window, c128
        What decode rows attend to, beside a C4 layer's choice.
    gathers
        Groups of prefill requests by kind of layer.
    prompts
        First row, row behind the last, and context length of each prefill request.
    attended
        Rows that attention writes: decode and prefill rows, and padding that is listed as decode rows.
    """

    tokens: Any
    positions: Any
    request: Any
    valid: Any
    candidates: Any
    tables: dict[str, Any]
    window_slots: Any
    state_slots: dict[LayerKind, Any]
    compressed_slots: dict[LayerKind, Any]
    window: Listed
    c128: Listed
    gathers: dict[LayerKind, tuple[Gather, ...]]
    prompts: tuple[tuple[int, int, int], ...]
    attended: int


@attrs.frozen
class Padding:
    """The shape of a graph's metadata, whatever the step.

    Attributes
    ----------
    tokens
        Rows of the step with padding.
    requests
        Rows of the block tables.
    context
        Tokens that the block tables reach to.
    decode
        Rows that are listed as decode rows; None: those of the step.
    """

    tokens: int
    requests: int
    context: int
    decode: int | None = None


def metadata(
    rows: Sequence[Rows],
    contexts: Mapping[int, Context],
    caches: Caches,
    engine: Engine,
    padding: Padding | None = None,
    shift: int = 0,
) -> Metadata:
    """Metadata of a micro-batch, on the host.

    Parameters
    ----------
    rows
        Decode rows first. None at all: padding only, what a graph is captured with.
    contexts
        By request; their blocks reach to the end of the rows.
    padding
        None: the step as it is.
    shift
        Which token a row is given: that of its position plus this (1 in the MTP block).
    """
    offsets = np.cumsum([0, *(one.count for one in rows)]).tolist()
    taken = offsets[-1]
    padding = padding or Padding(taken, len(rows), 0)
    at, request = np.zeros(padding.tokens, I64), np.zeros(padding.tokens, I32)
    tokens, valid = np.zeros(padding.tokens, I64), np.arange(padding.tokens) < taken
    for index, one in enumerate(rows):
        part = slice(offsets[index], offsets[index + 1])
        at[part] = np.arange(one.start, one.end)
        request[part] = index
        tokens[part] = contexts[one.request].tokens[one.start + shift : one.end + shift]
    held = [(contexts[one.request].blocks_of(caches).tables, one.start) for one in rows]
    tables = {group.name: _table(held, padding, group) for group in caches.groups}

    def slots(group: str, number: Any, block: int, there: Any) -> Any:
        """Slots of states by number within their request."""
        chosen = tables[group][request, np.where(there, number, 0) // block].astype(I64)
        return np.where(there, chosen * block + number % block, -1)

    state_slots: dict[LayerKind, Any] = {}
    compressed_slots: dict[LayerKind, Any] = {}
    kinds = [kind for kind in LayerKind if kind in caches.kinds]
    for kind in kinds:
        if kind is not LayerKind.SWA:
            ratio = RATIO[kind]
            group, block = STATES[kind]
            state_slots[kind] = slots(group, at, block, valid)
            ends = valid & ((at + 1) % ratio == 0)
            compressed_slots[kind] = slots(COMPRESSED, at // ratio, COMPRESSED_BLOCK // ratio, ends)
    decode = sum(not one.prefill for one in rows)
    listed = slice(0, decode if padding.decode is None else padding.decode)
    seen = np.where(valid, at + 1, 0)[listed]
    return Metadata(
        tokens=tokens,
        positions=at,
        request=request,
        valid=valid,
        candidates=np.where(valid, (at + 1) // 4, 0).astype(I32),
        tables=tables,
        window_slots=slots(SWA, at, SWA_BLOCK, valid),
        state_slots=state_slots,
        compressed_slots=compressed_slots,
        window=_window(tables[SWA], seen, request[listed], caches.config.sliding_window),
        c128=_c128(tables, seen, request[listed], engine.max_model_len),
        gathers={kind: gathers(rows, kind, caches.config, engine, offsets) for kind in kinds},
        prompts=tuple((offsets[i], offsets[i + 1], one.end) for i, one in enumerate(rows) if one.prefill),
        attended=max(taken, len(seen)),
    )


def _table(held: Sequence[tuple[Mapping[str, list[int]], int]], padding: Padding, group: Group) -> Any:
    """int32 [R, B], -1 behind a request's last block, and before the first that its rows still read."""
    blocks = [(tables[group.name], group.first_needed(start) // group.block_tokens) for tables, start in held]
    width = max([1, -(-padding.context // group.block_tokens), *(len(one) for one, _ in blocks)])
    table = np.full((max(1, padding.requests), width), -1, I32)
    for row, (one, first) in zip(table, blocks, strict=False):
        row[first : len(one)] = one[first:]
    return table


def _window(table: Any, seen: Any, request: Any, window: int) -> Listed:
    """The last positions of the first `seen` ones."""
    lens = np.minimum(seen, window)
    at = (seen - lens)[:, None] + np.arange(window)
    shown = np.arange(window) < lens[:, None]
    block = table[request[:, None], np.where(shown, at, 0) // SWA_BLOCK]
    return Listed(np.where(shown, block * SWA_BLOCK + at % SWA_BLOCK, -1).astype(I32), lens.astype(I32))


def _c128(tables: Mapping[str, Any], seen: Any, request: Any, longest: int) -> Listed:
    """All compressed states of C128 layers, in lists as wide as the longest context needs."""
    width, block = -(-longest // 128), COMPRESSED_BLOCK // 128
    lens = (seen // 128).astype(I32)
    state = np.arange(width)[None, :]
    shown = state < lens[:, None]
    if COMPRESSED not in tables:
        return Listed(np.full(shown.shape, -1, I32), lens)
    found = tables[COMPRESSED][request[:, None], np.where(shown, state, 0) // block]
    return Listed(np.where(shown, found * block + state % block, -1).astype(I32), lens)
