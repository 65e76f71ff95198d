"""Aliases: what a queued operation holds in place of the caller's tensors.

The caller may go on to transpose a tensor in place, point it at another storage, or drop it. The queue must see none of
that, and must not keep the block from being freed either: its alias has metadata of its own and, over device memory,
no claim on the block. Memory that is not the device's (weights made before it, host values) is kept alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from workspace.simulated.footprint import footprint

if TYPE_CHECKING:
    from workspace.simulated.memory import Memory
    from workspace.simulated.shapes import TensorSpec

Span = tuple[int, int]
"""(first address, bytes)."""
CAPACITY = 1 << 14


class Opaque(Exception):
    """The tensor has bytes the executor cannot name (sparse, quantised, wrapped or another device's)."""


class Alias:
    """An aliased tensor and what is known of it.

    Attributes
    ----------
    tensor
        The alias.
    signature
        Shape, strides, dtype and lazy bits: all that the shape of a result can depend on.
    spans
        The bytes it covers.
    hull
        Whether `spans` covers bytes the tensor does not touch.
    """

    __slots__ = ("hull", "signature", "spans", "tensor")

    def __init__(self, tensor: torch.Tensor, signature: tuple[Any, ...], address: int) -> None:
        self.tensor = tensor
        self.signature = signature
        intervals, self.hull = footprint(signature[0], signature[1], tensor.element_size())
        self.spans: tuple[Span, ...] = tuple((address + offset, length) for offset, length in intervals)


class Aliases:
    """Finds or makes the alias of a tensor. Called in the dispatch handler, with every mode off.

    Parameters
    ----------
    memory
        The device's segments.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._known: dict[tuple[Any, ...], Alias] = {}
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> Alias:
        """The alias of a strided tensor. Raises `Opaque`."""
        try:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg(), tensor.is_conj())
        except (RuntimeError, NotImplementedError) as error:
            raise Opaque(str(error)) from error
        known = self._known.get(key)
        return known if known is not None else self._learn(tensor, key)

    def at(self, address: int, spec: TensorSpec, tensor: torch.Tensor) -> Alias:
        """As `of`, for a new tensor of the device whose address and layout are known."""
        key = (address, spec.shape, spec.stride, spec.dtype, False, False)
        known = self._known.get(key)
        return known if known is not None else self._learn(tensor, key)

    def twin(self, alias: Alias) -> Alias:
        """A second alias of the same view: operators may ask whether two arguments are one tensor."""
        twin = object.__new__(Alias)
        twin.tensor = alias.tensor.detach()
        twin.signature, twin.spans, twin.hull = alias.signature, alias.spans, alias.hull
        return twin

    def forget_host_memory(self) -> None:
        """Let go of host memory. After the device synchronised, its addresses may be used again without a race."""
        self._known.clear()
        self._views.clear()

    def _learn(self, tensor: torch.Tensor, key: tuple[Any, ...]) -> Alias:
        address, shape, stride, dtype, negative, conjugate = key
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
            raise Opaque(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
        if not address and tensor.numel():
            raise Opaque("a tensor without bytes")
        base = self._memory.segment_of(address) if address else None
        if base is None:
            alias = tensor.detach()
        else:
            alias = self._whole(base, dtype).as_strided(shape, stride, (address - base) // dtype.itemsize)
            if conjugate:
                alias = torch.ops.aten._conj.default(alias)
            if negative:
                alias = torch.ops.aten._neg_view.default(alias)
        if len(self._known) >= CAPACITY:
            self.forget_host_memory()
        known = self._known[key] = Alias(alias, (shape, stride, dtype, negative, conjugate), address)
        return known

    def _whole(self, base: int, dtype: torch.dtype) -> torch.Tensor:
        view = self._views.get((base, dtype))
        if view is None:
            view = self._views[(base, dtype)] = self._memory.segment(base).view(dtype)
        return view


def address(tensor: torch.Tensor) -> int:
    """First byte of a tensor, read without the executor noticing (its own ``data_ptr`` counts as an escape)."""
    with torch._C.DisableTorchFunction():
        return tensor.data_ptr()
