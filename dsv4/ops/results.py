"""Outs and scratch as an op's returning form allocates them, from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    told
        Place and axis of each size that decides.
    like
        Place of the input whose dtype does.
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
        self._dims, self.told = tuple(told), tuple(told.values())
        activations = [place for place, one in always if one.dtype == LIKE]
        # An out has the activations' dtype, or one that depends on it.
        missing = not activations and any(one.dtype in (LIKE, WIDE) for one in self._wanted)
        self.untold = frozenset(names - told.keys()) | ({"dtype"} if missing else set())
        self.like = activations[0] if activations else always[0][0]
        self._known: dict[tuple[Any, ...], Known] = {}
        self._shape = [_function(one.shape, [*self._dims, *sorted(self.untold - {"dtype"})]) for one in self._wanted]

    def __call__(self, inputs: Sequence[Any], dims: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """New tensors in the order of `wanted`; raises KeyError where what is untold is missing, or more is told."""
        like = inputs[self.like]
        key = (like.dtype, *[inputs[place].size(axis) for place, axis in self.told], *dims.items())
        known = self._known.get(key)
        if known is None:
            known = self._shapes(key, like.dtype, dims)
        new = like.new_empty
        # A keyword costs as much as the key.
        return tuple([new(shape) if dtype is None else new(shape, dtype=dtype) for shape, dtype in known])

    def traced(self, inputs: Sequence[Any], dims: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The same where sizes may be symbols, as a compiler's; nothing is remembered."""
        if dims.keys() != self.untold:
            raise KeyError(*sorted(self.untold ^ dims.keys()))
        first = inputs[self.like]
        like = dims.get("dtype", first.dtype)
        sizes = [inputs[place].size(axis) for place, axis in self.told]
        sizes += [dims[name] for name in sorted(self.untold) if name != "dtype"]
        return tuple(
            [
                first.new_empty(shape(*sizes), dtype=one.dtypes(like)[0])
                for one, shape in zip(self._wanted, self._shape, strict=True)
            ]
        )

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


def _function(shape: tuple[int | str, ...], names: Sequence[str]) -> Callable[..., tuple[int, ...]]:
    """Sizes of a shape from the values of its names: what an op's own text says, as code."""
    made: Callable[..., tuple[int, ...]] = eval(f"lambda {', '.join(names)}: ({', '.join(map(str, shape))},)")
    return made
