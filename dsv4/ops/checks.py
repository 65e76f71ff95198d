"""What an op's Python face checks of the tensors of a call, before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dsv4.ops.argument import ANY, Argument
from dsv4.ops.errors import OpError
from dsv4.ops.kernels import dispatch_modes
from dsv4.ops.numbers import SYMBOLS
from dsv4.ops.rules import Call, Rules
from workspace import TensorSpec

is_compiling = torch.compiler.is_compiling

KINDS_KEPT = 1024
"""Combinations of shapes and dtypes that are remembered as sound."""


class Checks:
    """Refuses calls of one op by `OpError`: shapes, dtypes, devices, strides and bytes of what is written, rules.

    Parameters
    ----------
    op
        Its name, for messages.
    arguments
        The op's tensors by name.
    rules
        What they and the numbers must be together.
    """

    def __init__(self, op: str, arguments: Mapping[str, Argument], rules: Rules) -> None:
        self._op, self._arguments, self._rules = op, arguments, rules
        self._sound: set[tuple[Any, ...]] = set()

    def __call__(
        self,
        given: Mapping[str, Any],
        written: Mapping[str, torch.Tensor],
        numbers: Mapping[str, Any],
        like: torch.dtype | None,
        dims: Mapping[str, int],
        device: torch.device,
    ) -> None:
        """Inputs, what is written and numbers, with the activations' dtype, and the dims, that they bind."""
        every = {name: one for name, one in {**given, **written}.items() if one is not None}
        # Only looked at, never computed with: no mode need see it.
        with torch._C.DisableTorchFunction():
            kinds = (
                *((name, one.shape, one.dtype, one.device, one.is_contiguous()) for name, one in every.items()),
                *numbers.values(),
            )
            symbolic = bool(dispatch_modes()) or is_compiling()  # sizes may be symbols, which no set takes
            if symbolic or kinds not in self._sound:
                for name, tensor in every.items():
                    self._check_one(name, self._arguments[name], tensor, like, dims, device)
                    if name in written and not tensor.is_contiguous():
                        raise OpError(
                            f"{name} of {self._op} is not contiguous", "pass whole rows of a contiguous tensor"
                        )
                if not symbolic or _known(every, numbers):
                    self._rules(Call(self._op, {**given, **written, **numbers}))
                if not symbolic:
                    self._remember(kinds)
            self._check_apart(written, every)

    def _remember(self, kinds: tuple[Any, ...]) -> None:
        """Arguments of these kinds, which have passed, need not be looked at again."""
        if len(self._sound) >= KINDS_KEPT:
            self._sound.clear()
        self._sound.add(kinds)

    def _check_apart(self, written: Mapping[str, torch.Tensor], every: Mapping[str, torch.Tensor]) -> None:
        """Torch's own check cannot see two storages over the same bytes."""
        if is_compiling() or any(isinstance(one, FakeTensor) or one.is_meta for one in every.values()):
            return  # they have no bytes
        spans = {name: _span(one) for name, one in every.items() if one.numel()}
        for name in written:
            start, after = spans.get(name, (0, 0))
            for other, (begin, end) in spans.items():
                if start < end and begin < after and other != name:
                    raise OpError(f"{name} of {self._op} shares bytes with {other}", "pass other memory", name=name)

    def _check_one(
        self,
        name: str,
        argument: Argument,
        tensor: torch.Tensor,
        like: torch.dtype | None,
        dims: Mapping[str, int],
        device: torch.device,
    ) -> None:
        if tensor.dtype not in argument.dtypes(like):
            allowed = ", ".join(str(one).removeprefix("torch.") for one in argument.dtypes(like))
            raise OpError(f"{name} of {self._op} is {tensor.dtype}", f"it takes {allowed}", name=name)
        if tensor.device != device:
            raise OpError(f"{name} of {self._op} is on {tensor.device}", f"the op runs on {device}", name=name)
        if argument.shape == ANY:
            return
        shape, _ = TensorSpec(argument.shape, tensor.dtype).resolve(dims)
        if tuple(tensor.shape) != shape:
            raise OpError(
                f"{name} of {self._op} has shape {tuple(tensor.shape)}",
                f"{argument.text} is {shape} here",
                name=name,
            )


def _known(tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> bool:
    """Whether no size and no number is a symbol."""
    sizes = (size for one in tensors.values() for size in one.shape)
    return not any(isinstance(one, SYMBOLS) for one in (*sizes, *numbers.values()))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
