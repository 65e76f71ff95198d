"""What an op says about one of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property

import attrs
import torch

from workspace import TensorSpec

FLOAT = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
U8, I32, I64, F32, FP8 = torch.uint8, torch.int32, torch.int64, torch.float32, torch.float8_e4m3fn
BOOL = torch.bool

LIKE = "like"
"""The dtype of the op's activations, whatever it is among `FLOAT`."""

WIDE = "wide"
"""float64 where activations are, else float32: states, scores, weights, whatever is accumulated."""

ANY = ("...",)
"""Any shape."""

NAME = re.compile(r"[A-Za-z_]\w*")


@attrs.define(slots=False, frozen=True)
class Argument:
    """Shape and dtype of one tensor of an op. Made with `argument`.

    Attributes
    ----------
    shape
        Integers, dim names, or expressions of names that other arguments bind; `ANY` takes every shape.
    dtype
        A dtype, a tuple of them, `LIKE` or `WIDE`.
    optional
        Whether None may be passed.
    partly
        Of an out: the op writes a part of it only, so that a slot must keep what it already holds.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype | tuple[torch.dtype, ...] | str
    optional: bool = False
    partly: bool = False

    @cached_property
    def names(self) -> tuple[tuple[int, str], ...]:
        """Axes that bind a dim, with its name."""
        return tuple((axis, dim) for axis, dim in enumerate(self.shape) if isinstance(dim, str) and dim.isidentifier())

    @property
    def text(self) -> str:
        """The shape as messages say it."""
        return f"[{', '.join(map(str, self.shape))}]"

    def dtypes(self, like: torch.dtype | None) -> tuple[torch.dtype, ...]:
        """The dtypes allowed where activations are `like`."""
        if isinstance(self.dtype, torch.dtype):
            return (self.dtype,)
        if isinstance(self.dtype, tuple):
            return self.dtype
        if self.dtype == WIDE:
            return (torch.float64 if like is torch.float64 else torch.float32,)
        return (like,) if like in FLOAT else FLOAT

    def spec(self, like: torch.dtype | None, dims: Mapping[str, int | str]) -> TensorSpec:
        """As a layout's spec: the given dims put in (a number or another name), the rest left to the layout."""

        def put(match: re.Match[str]) -> str:
            return str(dims.get(match[0], match[0]))

        shape = [dim if isinstance(dim, int) else NAME.sub(put, dim) for dim in self.shape]
        return TensorSpec(
            tuple(int(dim) if isinstance(dim, str) and dim.isdigit() else dim for dim in shape), self.dtypes(like)[0]
        )


def argument(
    *shape: int | str,
    dtype: torch.dtype | tuple[torch.dtype, ...] | str = LIKE,
    optional: bool = False,
    partly: bool = False,
) -> Argument:
    """An `Argument`: ``argument("T", 64, dtype=torch.int32)``."""
    return Argument(shape, dtype, optional, partly)
