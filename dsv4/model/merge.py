"""Rows of several micro-batches and their order in the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from dsv4.model.decoder import Outcome
from dsv4.scheduler import Rows


def in_order(rows: Sequence[Rows], shares: Mapping[int, Sequence[Rows]], found: Mapping[int, Outcome]) -> Outcome:
    """The outcome of a step from those of its micro-batches, without padding, on the current stream."""
    counts = {index: sum(one.count for one in own) for index, own in shares.items()}
    if len(shares) == 1:
        ((index, only),) = found.items()
        streams = None if only.residual is None else only.residual[: counts[index]]
        return Outcome(only.hidden[: counts[index]], streams, only.sampled)
    taken = [one for own in shares.values() for one in own]
    place = {id(one): start for one, start in zip(taken, _starts(taken), strict=True)}
    order = np.concatenate([np.arange(place[id(one)], place[id(one)] + one.count) for one in rows])

    def merged(parts: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.cat([part[:count] for part, count in zip(parts, counts.values(), strict=True)])
        chosen = torch.empty(len(order), dtype=torch.int64, device=whole.device)
        return whole.index_select(0, chosen.copy_(torch.from_numpy(order)))

    ends = [start + one.count for one, start in zip(rows, _starts(rows), strict=True)]
    sampled = tuple(end - 1 for one, end in zip(rows, ends, strict=True) if one.samples)
    outcomes = [found[index] for index in shares]
    kept = [one.residual for one in outcomes if one.residual is not None]
    return Outcome(merged([one.hidden for one in outcomes]), merged(kept) if kept else None, sampled)


def rows_of(rows: Sequence[Rows], own: Sequence[Rows], tensor: torch.Tensor) -> torch.Tensor:
    """Rows of a step's tensor [T, ...] that belong to some of its requests, in their order."""
    starts = {id(one): start for one, start in zip(rows, _starts(rows), strict=True)}
    return torch.cat([tensor[starts[id(one)] : starts[id(one)] + one.count] for one in own])


def _starts(rows: Sequence[Rows]) -> list[int]:
    return list(accumulate((one.count for one in rows), initial=0))[:-1]
