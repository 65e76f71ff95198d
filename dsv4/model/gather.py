"""Groups of prefill requests whose keys are gathered together for attention."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from dsv4.batch import Batch
from dsv4.cache.caches import RATIO
from dsv4.config import LayerKind, ModelConfig
from dsv4.scheduler import Rows

I32 = torch.int32


@attrs.frozen(eq=False)
class Gather:
    """One group, its requests' keys one after the other: compressed states first, then the windows.

    Attributes
    ----------
    first_row, last_row
        The group's rows of the step, the last one excluded.
    request
        int32 [G], rows of the block tables.
    group
        int32 [rows], the row's request within the group.
    compressed_starts, window_starts
        int32 [G+1], where each request's compressed states and window keys lie among the gathered ones.
    compressed_first, window_first
        int32 [G], first state (0) and first position that is gathered.
    """

    first_row: int
    last_row: int
    request: torch.Tensor
    group: torch.Tensor
    compressed_starts: torch.Tensor
    window_starts: torch.Tensor
    compressed_first: torch.Tensor
    window_first: torch.Tensor


def gathers(
    rows: Sequence[Rows], kind: LayerKind, config: ModelConfig, batch: Batch, offsets: Sequence[int]
) -> tuple[Gather, ...]:
    """Prefill requests in order, as many to a group as the gathered keys of the batch hold.

    Parameters
    ----------
    offsets
        First row of each request in the step, and their end.
    """
    ratio, window = RATIO.get(kind, 0), config.sliding_window
    found: list[Gather] = []
    members: list[int] = []
    taken = 0
    for index, one in enumerate(rows):
        if not one.prefill:
            continue
        own = _compressed(one, ratio) + one.end - _first(one, window)
        if members and taken + own > batch.gather_keys[kind]:
            found.append(_gather(rows, members, ratio, window, offsets))
            members, taken = [], 0
        members.append(index)
        taken += own
    if members:
        found.append(_gather(rows, members, ratio, window, offsets))
    return tuple(found)


def _compressed(one: Rows, ratio: int) -> int:
    return one.end // ratio if ratio else 0


def _first(one: Rows, window: int) -> int:
    """The oldest position that a request's rows see."""
    return max(0, one.start - window + 1)


def _gather(rows: Sequence[Rows], members: list[int], ratio: int, window: int, offsets: Sequence[int]) -> Gather:
    compressed, windows = [0], []
    for index in members:
        compressed.append(compressed[-1] + _compressed(rows[index], ratio))
    windows.append(compressed[-1])
    for index in members:
        windows.append(windows[-1] + rows[index].end - _first(rows[index], window))
    counts = torch.tensor([rows[index].count for index in members])
    return Gather(
        offsets[members[0]],
        offsets[members[-1] + 1],
        torch.tensor(members, dtype=I32),
        torch.repeat_interleave(torch.arange(len(members), dtype=I32), counts),
        torch.tensor(compressed, dtype=I32),
        torch.tensor(windows, dtype=I32),
        torch.zeros(len(members), dtype=I32),
        torch.tensor([_first(rows[index], window) for index in members], dtype=I32),
    )
