"""Ways to a tensor's bytes that dispatch does not see: they wait for the stream, give a copy, or are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from workspace.errors import Unsupported
from workspace.simulated.shapes import map_tensors

if TYPE_CHECKING:
    from workspace.simulated.executor import Executor

Tensor = torch.Tensor

WAITS = frozenset({
    Tensor.__array__, Tensor.__deepcopy__, Tensor.__repr__, Tensor.__reduce_ex__, Tensor.tolist, Tensor.numpy,
})  # fmt: skip
"""Read their own tensor, outside dispatch."""
WAITS_FOR_INPUTS = frozenset(
    {
        torch.tensor,
        torch.as_tensor,
        torch.asarray,
        torch.tensor_split,
        torch.ctc_loss,
        Tensor.tensor_split,
        Tensor.new_tensor,
        Tensor.new,
    }
)
"""Read some of their tensor arguments outside dispatch, and then run as usual."""
ON_THE_HOST = frozenset({torch._VF._pad_packed_sequence})
"""Fill a tensor outside dispatch that they allocated through it: run as a whole, by the host."""
ESCAPES = frozenset({
    Tensor.__dlpack__, Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage, Tensor.share_memory_,
    Tensor.apply_, Tensor.map_, Tensor.map2_,
})  # fmt: skip
"""Give out the bytes themselves, to readers and writers that no stream orders."""
LIBRARY = str(Path(__file__).parents[1])
"""This library takes addresses and storages only to name bytes."""
SERIALISERS = frozenset({torch._tensor.__file__, torch._utils.__file__})
"""Torch's own files that take a storage to pickle it."""


class HostReads(TorchFunctionMode):
    """Watches torch's functions in one thread.

    A NumPy array made from a tensor is a read-only copy: an alias would be wrong as soon as the next operator is
    enqueued. An address given out by ``data_ptr`` makes the run's verdict UNKNOWN; where only the address matters, use
    ``driver.address_of``.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__()
        self._executor = executor
        self._routes: dict[Any, Callable[[Any, Any, Any], Any]] = {
            **dict.fromkeys(WAITS, self._read),
            **dict.fromkeys(WAITS_FOR_INPUTS, self._wait),
            **dict.fromkeys(ON_THE_HOST, self._run),
            **dict.fromkeys(ESCAPES, self._refuse),
            Tensor.data_ptr: self._address,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        route = self._routes.get(func)
        if route is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return route(func, args, kwargs or {})

    def _wait(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        map_tensors([list(args), list(kwargs.values())], tensors.append)
        if tensors:
            with _disable_current_modes(), DisableTorchFunction():
                self._executor.read(tensors, f"host reads for {func.__name__}")
        return func(*args, **kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes(), DisableTorchFunction():
            return self._wait(func, args, kwargs)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes(), DisableTorchFunction():
            self._executor.read([args[0]], f"host reads by {func.__name__}")
            value = func(*args, **kwargs)
            if func is Tensor.numpy or func is Tensor.__array__:
                value = value.copy()
                value.flags.writeable = False
            return value

    def _address(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not _caller().startswith(LIBRARY):
            self._executor.device.unknown("data_ptr() gave out an address: what reads or writes there is not seen")
        with DisableTorchFunction():
            return func(*args, **kwargs)

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> Any:
        caller = _caller()
        if caller.startswith(LIBRARY):
            with DisableTorchFunction():
                return func(*args, **kwargs)
        if func is Tensor.untyped_storage and caller in SERIALISERS:
            with _disable_current_modes(), DisableTorchFunction():
                self._executor.read([args[0]], "host reads to serialise")
                return args[0].untyped_storage().clone()
        raise escape(func.__name__)


def escape(name: str) -> Unsupported:
    """The refusal of a function that gives out bytes."""
    return Unsupported(
        f"{name} gives out the bytes of a tensor on the simulated device",
        "what is done through it is ordered by no stream: read with .tolist() or .numpy(), write with copy_",
    )


def _caller() -> str:
    """File of whoever called the torch function that is being routed."""
    return sys._getframe(3).f_code.co_filename
