"""Metadata of a step: what padding rows hold, and where arrays lie on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsv4.cache.caches import Caches
from dsv4.config import LayerKind
from dsv4.model.context import Context
from dsv4.model.execution import ENGINE, Execution
from dsv4.model.metadata import Metadata, Padding, metadata
from dsv4.model.presets import TINY
from dsv4.model.upload import ALIGNMENT, Buffer, Uploads, mapped, size
from dsv4.scheduler import Rows
from tests.dsv4.model.made import blocks_for, prompt


def host(*parts: tuple[int, int, bool], padding: Padding | None = None) -> Metadata:
    """Metadata of requests (start, count, prefill), which have taken their blocks."""
    caches = Caches(TINY, Execution().precision.storage, blocks_for(TINY, 1000))
    rows = [Rows(request, start, count, prefill, True) for request, (start, count, prefill) in enumerate(parts)]
    contexts = {one.request: Context(prompt(TINY, one.end, one.request), TINY.vocab_size, 1000) for one in rows}
    for one in rows:
        blocks = contexts[one.request].blocks_of(caches)
        if one.start:
            blocks.extend(0, one.start)
        blocks.extend(one.start, one.end)
    return metadata(rows, contexts, caches, ENGINE, padding)


def leaves(meta: Metadata) -> list[Any]:
    found: list[Any] = []
    mapped(meta, found.append)
    return found


def test_padding_rows_have_slots_of_minus_one_and_see_nothing() -> None:
    """Three rows padded to eight, listed as decode rows, as a full graph has them."""
    meta = host((9, 1, False), (127, 1, False), (3, 1, False), padding=Padding(8, 4, 160, decode=8))
    assert meta.valid.tolist() == [True] * 3 + [False] * 5 and meta.attended == 8
    slots = [meta.window_slots, *meta.state_slots.values(), *meta.compressed_slots.values()]
    assert len(slots) == 5 and all((one[3:] == -1).all() for one in slots)
    assert (meta.window_slots[:3] >= 0).all() and (meta.candidates[3:] == 0).all()
    assert meta.window.lens.tolist() == [10, 32, 4, 0, 0, 0, 0, 0] and meta.c128.lens.tolist() == [0, 1] + [0] * 6
    assert (meta.window.slots[3:] == -1).all() and meta.positions.tolist() == [9, 127, 3, 0, 0, 0, 0, 0]
    assert (meta.compressed_slots[LayerKind.C128] >= 0).tolist() == [False, True] + [False] * 6


def test_padding_alone_is_what_a_graph_is_captured_with() -> None:
    """Its arrays have the shapes of a step's, and the same place in the buffer."""
    padding = Padding(8, 4, 160)
    nothing, step = host(padding=padding), host((9, 1, False), (0, 5, True), padding=padding)
    assert not nothing.valid.any() and nothing.attended == 0 and nothing.prompts == ()
    assert step.attended == 6
    buffer = Buffer(torch.zeros(1 << 14, dtype=torch.uint8))
    captured = buffer.place(nothing)
    replayed = buffer.fill(step)
    for name in ("tokens", "positions", "request", "valid", "candidates", "window_slots"):
        assert getattr(captured, name) is getattr(replayed, name)
    assert all(captured.tables[name] is one for name, one in replayed.tables.items())
    for slots in ("state_slots", "compressed_slots"):
        assert all(getattr(captured, slots)[kind] is one for kind, one in getattr(replayed, slots).items())
    assert captured.positions.tolist() == step.positions.tolist()


@pytest.mark.parametrize("parts", [((0, 40, True),), ((9, 1, False), (4, 1, False), (20, 30, True), (0, 7, True))])
def test_what_arrives_is_what_was_made(parts: Any) -> None:
    """Every array, in its dtype and shape, in one buffer of the size that was said; numbers beside them are kept."""
    made = host(*parts)
    there = Uploads(torch.empty(0)).fill(made)
    assert there.prompts == made.prompts and there.attended == made.attended
    pairs = list(zip(leaves(made), _tensors(there), strict=True))
    assert len(pairs) > 20
    for array, tensor in pairs:
        assert tuple(tensor.shape) == array.shape and np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype and tensor.is_contiguous()
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for _, tensor in pairs if tensor.numel())
    assert all(start + count <= after for (start, count), (after, _) in zip(spans, spans[1:], strict=False))
    assert all((start - spans[0][0]) % ALIGNMENT == 0 for start, _ in spans)
    assert spans[-1][0] + spans[-1][1] - spans[0][0] <= size(made)


def test_steps_share_the_bytes_of_the_largest() -> None:
    """One after the other on a stream; nothing is allocated for a step that fits."""
    uploads = Uploads(torch.empty(0))
    first = uploads.fill(host((0, 40, True)))
    other = host((9, 1, False), (0, 40, True))
    second = uploads.fill(other)
    assert second.tokens.data_ptr() == first.tokens.data_ptr()
    assert second.positions.tolist() == other.positions.tolist()
    larger = host((0, 900, True))
    assert size(larger) > 1 << 16
    assert uploads.fill(larger).positions.tolist() == list(range(900))
    assert uploads.fill(other).tables["swa"].tolist() == other.tables["swa"].tolist()


def test_tables_name_the_blocks_that_are_read() -> None:
    """A row at 900 reads 7 positions before it of C4's states, 127 of C128's, and every compressed key."""
    tables = host((900, 1, False)).tables
    assert {name: int((one[0] < 0).sum()) for name, one in tables.items()} == {
        "swa": (900 - 31) // 64, "compressed": 0, "c4_state": (900 - 7) // 4, "c128_state": (900 - 127) // 8,
    }  # fmt: skip


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors in the order of the arrays they came from."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [one for item in value.values() for one in _tensors(item)]
    if isinstance(value, tuple):
        return [one for item in value for one in _tensors(item)]
    fields = getattr(type(value), "__attrs_attrs__", ())
    return [one for field in fields for one in _tensors(getattr(value, field.name))]
