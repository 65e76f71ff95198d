"""The shape ladder: what an operator will return, found without its inputs' values.

Cache; then the operator itself on zeros of equal strides ("dry"), which gives the CPU kernel's own shapes, strides and
dtypes; then its meta kernel. Dry fails where zeros are no valid input (a singular matrix), meta where there is no
kernel, and meta kernels promise other strides or dtypes than the CPU's for some operators (bfloat16 layer norm, FFTs).
Large inputs and operators of other libraries, whose fake kernel is their contract, go to meta first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workspace.simulated.aliases import Opaque
from workspace.simulated.footprint import extent
from workspace.simulated.operators import Operator

CAPACITY = 1 << 15
LARGE = 1 << 20
"""Elements of input above which a rehearsal on zeros is not tried first."""


class NoShape(Exception):
    """Neither rung answered.

    Attributes
    ----------
    meta, dry
        What each raised.
    """

    def __init__(self, meta: Exception, dry: Exception) -> None:
        super().__init__(f"meta: {meta!r}; dry: {dry!r}")
        self.meta = meta
        self.dry = dry

    def refused(self) -> Exception | None:
        """The operator's own error, when both rungs agree that the call is wrong."""
        agree = type(self.meta) is type(self.dry) and not isinstance(self.dry, NotImplementedError)
        return self.dry if agree else None


class TensorSpec:
    """Shape, strides (elements), dtype and storage extent (bytes) of a tensor to come."""

    __slots__ = ("count", "dtype", "flat", "nbytes", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise Opaque(f"a result that is a {tensor.layout} tensor of {tensor.dtype}")
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.nbytes = extent(self.shape, self.stride, tensor.element_size())
        self.count = self.nbytes // tensor.element_size()
        self.flat = len(self.shape) == 1 and (self.stride == (1,) or self.shape[0] < 2)


class Outcome:
    """What a call returns, and which of its ``out=`` tensors it resizes.

    Attributes
    ----------
    value
        Its result with a `TensorSpec` in place of each tensor.
    resized
        Arguments that come out with another shape.
    """

    __slots__ = ("resized", "value")

    def __init__(self, value: Any, resized: dict[str, TensorSpec]) -> None:
        self.value = value
        self.resized = resized


class ShapeLadder:
    """Predicts outcomes. Called with every mode off."""

    def __init__(self) -> None:
        self._known: dict[Any, Outcome] = {}
        self.climbs = {"meta": 0, "dry": 0}

    def outcome(self, operator: Operator, key: Any, args: Any, kwargs: Any) -> Outcome:
        """What `operator` would return for arguments of this signature. Raises `NoShape`."""
        known = self._known.get(key)
        if known is None:
            known = self.climb(operator, args, kwargs)
            if len(self._known) >= CAPACITY:
                self._known.clear()
            self._known[key] = known
        return known

    def rehearse(self, operator: Operator, args: Any, kwargs: Any) -> Outcome:
        """The outcome by the dry rung, never from the cache: it also advances the generator as the real call would."""
        self.climbs["dry"] += 1
        return _try(operator, args, kwargs, _zeros)

    def climb(self, operator: Operator, args: Any, kwargs: Any) -> Outcome:
        """The outcome without the cache. Raises `NoShape`."""
        rungs = [self.rehearse, self._ask]
        if operator.custom or _elements((args, list(kwargs.values()))) > LARGE:
            rungs.reverse()
        failed: dict[Any, Exception] = {}
        for rung in rungs:
            try:
                return rung(operator, args, kwargs)
            except Opaque:
                raise
            except Exception as error:
                failed[rung] = error
        raise NoShape(failed[self._ask], failed[self.rehearse])

    def _ask(self, operator: Operator, args: Any, kwargs: Any) -> Outcome:
        self.climbs["meta"] += 1
        return _try(operator, args, _on_meta(operator, args, kwargs), _meta)


def _try(operator: Operator, args: Any, kwargs: Any, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> Outcome:
    stood: dict[int, torch.Tensor] = {}

    def replace(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in stood:
            stood[id(value)] = stand_in(value)
        return stood[id(value)]

    trial = map_tensors(args, replace), {name: map_tensors(value, replace) for name, value in kwargs.items()}
    result = operator.call(*trial[0], **trial[1])
    resized = {}
    for key in operator.outputs:
        before, after = kwargs.get(key), trial[1].get(key)
        if before is not None and after is not None and before.shape != after.shape:
            resized[key] = TensorSpec(after)
    return Outcome(map_tensors(result, TensorSpec), resized)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with its tensors changed; lists and tuples are copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


def _elements(value: Any) -> int:
    count = 0

    def add(tensor: torch.Tensor) -> None:
        nonlocal count
        count += tensor.numel()

    map_tensors(value, add)
    return count


def _on_meta(operator: Operator, args: Any, kwargs: Any) -> dict[str, Any]:
    """Keyword arguments that keep the result on the meta device."""
    if operator.device and (kwargs.get("device") is not None or not _has_tensors(args)):
        return {**kwargs, "device": torch.device("meta")}
    return dict(kwargs)


def _has_tensors(args: Any) -> bool:
    return any(isinstance(a, torch.Tensor) or (isinstance(a, (list, tuple)) and _has_tensors(a)) for a in args)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return _lazy_bits(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), tensor)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(extent(tensor.shape, tensor.stride(), 1), dtype=tensor.dtype)
    return _lazy_bits(zeros.as_strided(tensor.shape, tensor.stride()), tensor)


def _lazy_bits(stand_in: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj():
        stand_in = torch.ops.aten._conj.default(stand_in)
    if tensor.is_neg():
        stand_in = torch.ops.aten._neg_view.default(stand_in)
    return stand_in
