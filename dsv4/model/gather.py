"""Groups of prefill requests whose keys are gathered together for attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from dsv4.batch import GATHER_GROUP
from dsv4.config import RATIO, LayerKind, ModelConfig
from dsv4.engine import Engine
from dsv4.scheduler import Rows

I32 = np.int32


@attrs.frozen(eq=False)
class Gather:
    """One group, its requests' keys one after the other: compressed states first, then the windows.

    Attributes
    ----------
    first_row, last_row
        The group's rows of the step, the last one excluded.
    keys
        Gathered ones.
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
    keys: int
    request: Any
    group: Any
    compressed_starts: Any
    window_starts: Any
    compressed_first: Any
    window_first: Any


def most_keys(kind: LayerKind, config: ModelConfig, engine: Engine) -> int:
    """Keys that a group gathers at most: those of `GATHER_GROUP` contexts of full length, rows of the step included."""
    longest = engine.max_model_len // RATIO[kind] if RATIO[kind] else 0
    return GATHER_GROUP * (longest + config.sliding_window) + engine.max_num_batched_tokens


def gathers(
    rows: Sequence[Rows], kind: LayerKind, config: ModelConfig, engine: Engine, offsets: Sequence[int]
) -> tuple[Gather, ...]:
    """Prefill requests in order, as many to a group as `most_keys` allows; arrays on the host.

    Parameters
    ----------
    offsets
        First row of each request in the step, and their end.
    """
    ratio, window = RATIO[kind], config.sliding_window
    most, found = most_keys(kind, config, engine), list[Gather]()
    members: list[int] = []
    taken = 0
    for index, one in enumerate(rows):
        if not one.prefill:
            continue
        own = _compressed(one, ratio) + one.end - _first(one, window)
        if members and taken + own > most:
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
    compressed = np.cumsum([0, *(_compressed(rows[index], ratio) for index in members)])
    windows = np.cumsum([compressed[-1], *(rows[index].end - _first(rows[index], window) for index in members)])
    counts = [rows[index].count for index in members]
    return Gather(
        offsets[members[0]],
        offsets[members[-1] + 1],
        int(windows[-1]),
        np.array(members, I32),
        np.repeat(np.arange(len(members), dtype=I32), counts),
        compressed.astype(I32),
        windows.astype(I32),
        np.zeros(len(members), I32),
        np.array([_first(rows[index], window) for index in members], I32),
    )
