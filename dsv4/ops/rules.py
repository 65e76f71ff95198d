"""What arguments of an op must be together, beyond the shape and dtype that each declares.

In the words of the kernels' host checks (``csrc/dsv4``), which ask for more: sizes that a kernel was written for. What
no implementation can compute is refused here, before any of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsv4.cache.pages import Format
from dsv4.ops.errors import OpError

INT32_MAX = 2**31 - 1
MOST_STATES = 1 << 20
"""States of a page (``csrc/dsv4/pages.cuh``)."""


class Call:
    """The arguments of one call by name, tensors and numbers."""

    __slots__ = ("_arguments", "_op")

    def __init__(self, op: str, arguments: Mapping[str, Any]) -> None:
        self._op, self._arguments = op, arguments

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def require(self, holds: bool, name: str, problem: str, remedy: str) -> None:
        """Raise `OpError` about the argument of that name unless the condition holds."""
        if not holds:
            raise OpError(f"{name} of {self._op} {problem}", remedy, name=name)


Rules = Callable[[Call], None]
"""Raises `OpError` for arguments that do not fit together."""


def rotation(call: Call, width: int) -> None:
    """The RoPE table turns pairs of the tail of `width` dims."""
    turned = call["cos_sin"].shape[1]
    call.require(
        0 < turned <= width and turned % 2 == 0,
        "cos_sin",
        f"has {turned} columns",
        f"pass an even number of them, at most {width}",
    )


def group(call: Call) -> None:
    """There are tokens in a group."""
    ratio = call["ratio"]
    call.require(0 < ratio <= INT32_MAX, "ratio", f"is {ratio}", "pass the tokens of a group")


def paged(call: Call, name: str, block_size: str, width: int, rope: int) -> None:
    """A cache's format, dtype and page size can be those of states of `width` dims, `rope` of them rotated.

    Whether its pages have room for them is for `dsv4.cache.pages` to say.
    """
    states, layout = call[block_size], Format(call["format"])
    call.require(0 < states < MOST_STATES, block_size, f"is {states}", "pass the states of a page")
    call.require(0 <= rope <= width, "rope", f"is {rope}", f"pass how many of the {width} dims are rotated")
    plain = layout is Format.PLAIN
    call.require(
        (call[name].dtype is torch.uint8) != plain,
        name,
        "has another dtype",
        "plain caches are of a float dtype" if plain else "pages are uint8",
    )
    apart = width - rope
    call.require(
        apart % _SCALED.get(layout, 1) == 0,
        name,
        f"has no {layout.name} states of {width} dims, {rope} of them rotated",
        f"pass a multiple of {_SCALED.get(layout, 1)} that are not",
    )


_SCALED = {Format.FP8_DS_MLA: 64, Format.INDEXER_FP4: 32}
"""Dims that share a scale, where a state has several scales."""
