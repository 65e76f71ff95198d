"""Enqueueing: operator calls become nodes, and their results tensors that will hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from workspace.simulated import flags
from workspace.simulated.aliases import Aliases
from workspace.simulated.arguments import Bound
from workspace.simulated.call import Call
from workspace.simulated.flags import Flags
from workspace.simulated.lendings import Use
from workspace.simulated.operators import Key, Operator
from workspace.simulated.poison import Poison
from workspace.simulated.random_state import Draw
from workspace.simulated.results import Results
from workspace.simulated.shapes import Outcome, TensorSpec, map_tensors

if TYPE_CHECKING:
    from workspace.simulated.device import Device
    from workspace.simulated.node import Node

COPY = Operator(torch.ops.aten.copy_.default)


class Enqueueing:
    """Puts calls on the calling thread's current stream. Called with the device's lock held and every mode off.

    Attributes
    ----------
    witness
        Called after each call has run, in the thread that drains; see `workspace.simulated.witness`.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.aliases = Aliases(device.memory)
        self.witness: Callable[[Call], None] | None = None
        self._flags = flags.current()
        self._enqueued = 0

    def _bind(self, operator: Operator, args: Any, kwargs: Any) -> Bound:
        return Bound(operator, args, kwargs, self.aliases, torch.get_default_dtype())

    def _enqueue(
        self, operator: Operator, args: Any, kwargs: Any, bound: Bound, outcome: Outcome, start: Draw | None = None
    ) -> Any:
        device = self.device
        stream = device.current_stream()
        made, landing = None, None
        if operator.fresh:
            results = Results(device, self.aliases, stream)
            made = results.make(new_values(operator, outcome.value))
            landing = results.landing
            if results.fills:
                device.launch("poison", (), results.spans, Poison(results.fills, results.tensors), stream)
                bound.writes += results.spans
                bound.written += results.tensors
        if operator.blank and operator.fresh:
            return made
        label = f"{operator.label} (hull)" if bound.hull else operator.label
        call = Call(operator.call, label, bound.args, bound.kwargs, landing, bound.written, self._now(), start)
        self._launch(call, bound.reads, bound.writes, stream, bound.lent)
        return made if not operator.written else returned(operator, args, kwargs, made)

    def _launch(self, call: Call, reads: Any, writes: Any, stream: int, lent: Sequence[Use] = ()) -> Node:
        if self.witness is not None:
            call.witness, call.ordinal = self.witness, self._enqueued
            self._enqueued += 1
        return self.device.judged(self.device.launch(call.label, reads, writes, call, stream), lent)

    def _upload(self, value: Any, label: str) -> Any:
        """Tensors of the device that will hold host values."""
        stream = self.device.current_stream()
        results = Results(self.device, self.aliases, stream)
        made = results.make(map_tensors(value, TensorSpec))
        if not results.tensors:
            return made
        call = Call(lambda: value, label, (), {}, results.landing, results.tensors, self._now())
        self._launch(call, (), results.spans, stream)
        return made

    def _now(self) -> Flags:
        now = flags.current()
        if now != self._flags:
            self._flags = now
        return self._flags

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        bound = self._bind(COPY, (target, source), {})
        self._enqueue(COPY, (target, source), {}, bound, Outcome(None, {}))

    def _fit(self, kwargs: Any, resized: dict[str, TensorSpec]) -> None:
        """``out=`` tensors of another shape are resized at enqueue, as their shape is known then."""
        for key, spec in resized.items():
            self._make_room(kwargs[key], spec.shape)
            kwargs[key].resize_(spec.shape)

    def _make_room(self, tensor: torch.Tensor, shape: torch.Size) -> None:
        """Storage of the device large enough for `shape`; the bytes there were move with the tensor.

        Raises what torch raises where the storage is not the allocator's own, but bytes that somebody lends.
        """
        offset = tensor.storage_offset()
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - offset
        if shape.numel() <= room:
            return
        storage = tensor.untyped_storage()
        block = self.device.allocator.at(storage.data_ptr())
        if not (storage.resizable() or (block is not None and block.tensor)):
            raise RuntimeError("Trying to resize storage that is not resizable")
        results = Results(self.device, self.aliases, self.device.current_stream())
        fresh = results.make(TensorSpec(torch.empty(shape.numel(), dtype=tensor.dtype, device="meta")))
        self.device.launch("poison", (), results.spans, Poison(results.fills, results.tensors))
        if room > 0:
            self._copy(fresh[:room], tensor.as_strided((room,), (1,), offset))
        tensor.set_(fresh)


def new_values(operator: Operator, value: Any) -> Any:
    """The part of a result that is new, None where an argument is returned."""
    if operator.single:
        return value
    return tuple(None if source is not None else v for source, v in zip(operator.returned, value, strict=True))


def returned(operator: Operator, args: Any, kwargs: Any, made: Any) -> Any:
    """What the caller gets: the arguments the operator says it returns, and new values."""

    def argument(key: Key) -> Any:
        return kwargs[key] if isinstance(key, str) else args[key]

    keys = operator.returned
    if not keys:
        return None
    if operator.single:
        return made if keys[0] is None else argument(keys[0])
    return tuple(made[i] if key is None else argument(key) for i, key in enumerate(keys))
