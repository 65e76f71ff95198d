"""The decode rows of a step."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from dsv4.model.metadata import Metadata


@attrs.frozen(eq=False)
class DecodeRows:
    """What every layer reads of the rows that come first, cut from a step's metadata once.

    Attributes
    ----------
    count
        How many there are, padding that is listed among them included.
    alone
        Whether the step has no others.
    request, candidates, valid, chosen
        As in `Metadata` and `Body`.
    """

    count: int
    alone: bool
    request: torch.Tensor
    candidates: torch.Tensor
    valid: torch.Tensor
    chosen: torch.Tensor | None

    def of(self, tensor: Any) -> Any:
        """Their part of a tensor of all rows, [T, ...]."""
        return tensor if self.alone else tensor[: self.count]


def decode_rows(meta: Metadata, chosen: torch.Tensor | None) -> DecodeRows:
    """The decode rows of a step's metadata, on the device."""
    count = meta.window.lens.shape[0]
    return DecodeRows(
        count,
        count == meta.positions.shape[0],
        meta.request[:count],
        meta.candidates[:count],
        meta.valid[:count],
        None if chosen is None else chosen[:count],
    )
