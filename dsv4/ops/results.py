"""Outs and scratch as an op's returning form allocates them, from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsv4.ops.argument import LIKE, NAME, WIDE, Argument

KEPT = 1024
"""Combinations of sizes that are remembered."""

Known = tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
"""Shapes, and dtypes where they are not those of the tensor that is asked."""


class Results:
    """Allocates what an op writes.

    Parameters
    ----------
    inputs
        Place in the call, name and description of each input.
    wanted
        Outs and scratch by name, in the schema's order.

    Attributes
    ----------
    untold
        Dims of what is wanted that no input has; "dtype", too, where one has the activations' and no input does.
    """

    def __init__(self, inputs: Sequence[tuple[int, str, Argument]], wanted: Mapping[str, Argument]) -> None:
        self._wanted = tuple(wanted.values())
        names = {name for one in self._wanted for dim in one.shape for name in NAME.findall(str(dim))}
        told: dict[str, tuple[int, int]] = {}
        always = [(place, one) for place, _, one in inputs if not one.optional]
        for place, one in always:
            for axis, dim in one.names:
                if dim in names:
                    told.setdefault(dim, (place, axis))
        self._dims, self._sizes = tuple(told), tuple(told.values())
        activations = [place for place, one in always if one.dtype == LIKE]
        # An out has the activations' dtype, or one that depends on it.
        missing = not activations and any(one.dtype in (LIKE, WIDE) for one in self._wanted)
        self.untold = frozenset(names - told.keys()) | ({"dtype"} if missing else set())
        self._like = activations[0] if activations else always[0][0]
        self._known: dict[tuple[Any, ...], Known] = {}

    def __call__(self, inputs: Sequence[Any], dims: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """New tensors in the order of `wanted`; raises KeyError where what is untold is missing, or more is told."""
        like = inputs[self._like]
        key = (like.dtype, *[inputs[place].size(axis) for place, axis in self._sizes], *dims.items())
        known = self._known.get(key)
        if known is None:
            known = self._shapes(key, like.dtype, dims)
        new = like.new_empty
        # A keyword costs as much as the key.
        return tuple([new(shape) if dtype is None else new(shape, dtype=dtype) for shape, dtype in known])

    def _shapes(self, key: tuple[Any, ...], given: torch.dtype, dims: Mapping[str, Any]) -> Known:
        if dims.keys() != self.untold:
            raise KeyError(*sorted(self.untold ^ dims.keys()))
        if len(self._known) >= KEPT:
            self._known.clear()
        bound: dict[str, Any] = dict(zip(self._dims, key[1:], strict=False))
        bound.update(dims)
        like = bound.pop("dtype", given)
        found = []
        for one in self._wanted:
            shape, _ = one.spec(like, bound).resolve({})
            dtype = one.dtypes(like)[0]
            found.append((shape, None if dtype is given else dtype))
        self._known[key] = tuple(found)
        return self._known[key]
