"""What every layer of a step reads about its rows: positions, slots, tables, and the keys each row attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from dsv4.batch import Batch
from dsv4.cache.caches import RATIO, Caches
from dsv4.cache.groups import C4_STATE, C128_STATE, COMPRESSED, COMPRESSED_BLOCK, SWA, SWA_BLOCK
from dsv4.config import LayerKind
from dsv4.engine import Engine
from dsv4.model.context import Context
from dsv4.model.gather import Gather, gathers
from dsv4.scheduler import Rows

I32, I64 = torch.int32, torch.int64

STATES = {LayerKind.C4: (C4_STATE, 4), LayerKind.C128: (C128_STATE, 8)}
"""Group and rows of a block of each kind's compressor states."""


@attrs.frozen(eq=False)
class Listed:
    """Slots each decode row attends to: int32 [Td, K] and how many count, int32 [Td]."""

    slots: torch.Tensor
    lens: torch.Tensor


@attrs.frozen(eq=False)
class Metadata:
    """A step's rows: decode rows first, then prefill rows, then padding.

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
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    request: torch.Tensor
    valid: torch.Tensor
    candidates: torch.Tensor
    tables: dict[str, torch.Tensor]
    window_slots: torch.Tensor
    state_slots: dict[LayerKind, torch.Tensor]
    compressed_slots: dict[LayerKind, torch.Tensor]
    window: Listed
    c128: Listed
    gathers: dict[LayerKind, tuple[Gather, ...]]
    prompts: tuple[tuple[int, int, int], ...]


def metadata(
    rows: Sequence[Rows],
    contexts: Mapping[int, Context],
    caches: Caches,
    batch: Batch,
    engine: Engine,
    padded: int = 0,
    shift: int = 0,
) -> Metadata:
    """Metadata of a micro-batch, on the CPU.

    Parameters
    ----------
    rows
        Decode rows first.
    contexts
        By request; their blocks reach to the end of the rows.
    batch
        `dsv4.batch.batch_of` of the rows.
    padded
        Rows of the step including padding; 0: none.
    shift
        Which token a row is given: that of its position plus this (1 in the MTP block).
    """
    missing = max(0, padded - batch.tokens)
    at = torch.cat([torch.arange(one.start, one.end) for one in rows] + [torch.zeros(missing, dtype=I64)])
    index = torch.repeat_interleave(torch.arange(len(rows), dtype=I32), torch.tensor([one.count for one in rows]))
    request = torch.cat((index, torch.zeros(missing, dtype=I32)))
    valid = torch.arange(len(at)) < batch.tokens
    ids = [token for one in rows for token in contexts[one.request].tokens[one.start + shift : one.end + shift]]
    tables = {
        group.name: _table([contexts[one.request].blocks_of(caches).tables[group.name] for one in rows])
        for group in caches.groups
    }
    kinds = set(caches.kinds)

    def slots(group: str, number: torch.Tensor, block: int, there: torch.Tensor) -> torch.Tensor:
        """Slots of states by number within their request."""
        chosen = tables[group][request.long(), number // block]
        return torch.where(there & valid, chosen.long() * block + number % block, -1)

    state_slots, compressed_slots = {}, {}
    for kind in kinds - {LayerKind.SWA}:
        ratio = RATIO[kind]
        group, block = STATES[kind]
        state_slots[kind] = slots(group, at, block, valid)
        compressed_slots[kind] = slots(COMPRESSED, at // ratio, COMPRESSED_BLOCK // ratio, (at + 1) % ratio == 0)
    decode = slice(0, batch.decode)
    offsets = [0]
    for one in rows:
        offsets.append(offsets[-1] + one.count)
    prompts = tuple((offsets[i], offsets[i + 1], one.end) for i, one in enumerate(rows) if one.prefill)
    return Metadata(
        tokens=torch.tensor(ids + [0] * missing, dtype=I64),
        positions=at,
        request=request,
        valid=valid,
        candidates=((at + 1) // 4).to(I32),
        tables=tables,
        window_slots=slots(SWA, at, SWA_BLOCK, valid),
        state_slots=state_slots,
        compressed_slots=compressed_slots,
        window=_window(tables[SWA], at[decode], request[decode], caches.config.sliding_window),
        c128=_c128(tables, at[decode], request[decode], engine.max_model_len),
        gathers={kind: gathers(rows, kind, caches.config, batch, offsets) for kind in kinds},
        prompts=prompts,
    )


def _table(blocks: list[list[int]]) -> torch.Tensor:
    """int32 [R, B], -1 behind a request's last block."""
    width = max(map(len, blocks))
    return torch.tensor([one + [-1] * (width - len(one)) for one in blocks], dtype=I32)


def _window(table: torch.Tensor, positions: torch.Tensor, request: torch.Tensor, window: int) -> Listed:
    lens = (positions + 1).clamp(max=window)
    at = (positions + 1 - lens)[:, None] + torch.arange(window)
    shown = torch.arange(window) < lens[:, None]
    block = table[request.long()[:, None], torch.where(shown, at, 0) // SWA_BLOCK].long()
    return Listed(torch.where(shown, block * SWA_BLOCK + at % SWA_BLOCK, -1).to(I32), lens.to(I32))


def _c128(tables: Mapping[str, torch.Tensor], positions: torch.Tensor, request: torch.Tensor, longest: int) -> Listed:
    """All compressed states of C128 layers, in lists as wide as the longest context needs."""
    width, block = -(-longest // 128), COMPRESSED_BLOCK // 128
    lens = ((positions + 1) // 128).to(I32)
    state = torch.arange(width).expand(len(positions), -1)
    shown = state < lens[:, None]
    if COMPRESSED not in tables:
        return Listed(torch.full(state.shape, -1, dtype=I32), lens)
    found = tables[COMPRESSED][request.long()[:, None], torch.where(shown, state, 0) // block].long()
    return Listed(torch.where(shown, found * block + state % block, -1).to(I32), lens)
