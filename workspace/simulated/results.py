"""Results of calls that have not run: real tensors in fresh device memory, handed out at enqueue."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from workspace.simulated.aliases import Aliases, Span
from workspace.simulated.poison import BOOL, BYTE, Fill
from workspace.simulated.shapes import TensorSpec

ROUND = 512


class Results:
    """Tensors for one outcome.

    Parameters
    ----------
    device
        Allocates their memory, for `stream`.
    aliases
        Of the device.
    stream
        The stream that will write them.

    Attributes
    ----------
    landing
        Aliases of the tensors, in the structure of the outcome.
    spans
        Their bytes.
    fills
        The poison they start with.
    tensors
        The aliases in a flat list.
    """

    __slots__ = ("_aliases", "_device", "_stream", "fills", "landing", "spans", "tensors")

    def __init__(self, device: Any, aliases: Aliases, stream: int) -> None:
        self._device = device
        self._aliases = aliases
        self._stream = stream
        self.landing: Any = None
        self.spans: list[Span] = []
        self.fills: list[Fill] = []
        self.tensors: list[torch.Tensor] = []

    def make(self, value: Any) -> Any:
        """The result with a tensor in place of each spec, and `landing` to match."""
        result, self.landing = self._make(value)
        return result

    def _make(self, value: Any) -> tuple[Any, Any]:
        if type(value) is TensorSpec:
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            made = [self._make(item) for item in value]
            return type(value)(result for result, _ in made), [place for _, place in made]
        return value, None

    def _tensor(self, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
        if not spec.nbytes:
            empty = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
            return empty, empty.detach()
        buffer = self._device.alloc(spec.nbytes, self._stream)
        address = buffer.address
        buffer.block.tensor = True  # the allocator heeds record_stream for it
        holder = _holder(-(-spec.nbytes // ROUND) * ROUND).from_address(address)
        holder.buffer = buffer  # freed with the storage, when its last view dies
        tensor = torch.frombuffer(holder, dtype=spec.dtype, count=spec.count)
        if not spec.flat:
            tensor = tensor.as_strided(spec.shape, spec.stride)
        alias = self._aliases.at(address, spec, tensor).tensor
        self.spans.append((address, spec.nbytes))
        self.fills.append((address, BOOL if spec.dtype is torch.bool else BYTE, spec.nbytes))
        self.tensors.append(alias)
        return tensor, alias


@lru_cache(maxsize=1024)
def _holder(nbytes: int) -> Any:
    """A type whose instances lend `torch.frombuffer` bytes at an address, and carry what keeps those allocated."""
    return type("Holder", (ctypes.c_char * nbytes,), {})
