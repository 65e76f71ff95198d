"""Deferred execution of torch operators: each becomes a node on the calling thread's current stream.

Results are real tensors in memory of the device's caching allocator, handed out at enqueue and poisoned by a node of
their own. At execution the real operator runs on aliases of its arguments; in-place and ``out=`` operators write where
they would, new results are copied into the tensors handed out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction

from workspace.simulated import flags
from workspace.simulated.aliases import Aliases, Opaque
from workspace.simulated.arguments import Bound
from workspace.simulated.call import Answer, Call
from workspace.simulated.execution import run
from workspace.simulated.flags import Flags
from workspace.simulated.operators import Key, Kind, Operator, decompose
from workspace.simulated.poison import Poison
from workspace.simulated.random_state import Draw, draw
from workspace.simulated.results import Results
from workspace.simulated.shapes import NoShape, Outcome, ShapeLadder, TensorSpec, map_tensors

if TYPE_CHECKING:
    from workspace.simulated.device import Device
    from workspace.simulated.dispatch import Dispatch
    from workspace.simulated.node import Node

MASKS = (torch.bool, torch.uint8)


class Executor:
    """Turns operator calls into nodes of one device. Threads reach it through their `Dispatch` mode.

    Parameters
    ----------
    device
        Whose queue, allocator and clocks to use.

    Attributes
    ----------
    witness
        Called after each call has run, in the thread that drains; see `workspace.simulated.witness`.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.aliases = Aliases(device.memory)
        self.ladder = ShapeLadder()
        self.witness: Callable[[Call], None] | None = None
        self._operators: dict[Any, Operator] = {}
        self._flags = flags.current()
        self._enqueued = 0
        device.executor = self  # type: ignore[attr-defined]
        device.queue.execute = run
        self._routes: dict[Kind, Callable[[Operator, Any, Any], Any]] = {
            Kind.DEFERRED: self._defer,
            Kind.RANDOM: self._random,
            Kind.IMMEDIATE: self._at_once,
            Kind.RESIZE: self._resize,
            Kind.LIFT: self._lift,
            Kind.HOST: self._host,
            Kind.SAMPLER: self._sampler,
        }

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's bytes are the device's."""
        with DisableTorchFunction():
            try:
                return self.device.memory.segment_of(tensor.data_ptr()) is not None
            except (RuntimeError, NotImplementedError):  # it has no one address
                return False

    def dispatch(self, func: Any, args: Any, kwargs: Any, mode: Dispatch) -> Any:
        """Run or enqueue one operator call, with every mode off; return what the caller gets."""
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = Operator(func)
        if operator.kind is Kind.COMPOSITE:
            with mode:
                return decompose(func, args, kwargs)
        if operator.device and _elsewhere(kwargs.get("device")):
            return operator.call(*args, **kwargs)
        try:
            with self.device.lock:
                return self._routes[operator.kind](operator, args, kwargs)
        except Opaque as opaque:
            return self._unmodelled(operator, args, kwargs, str(opaque))

    def read(self, tensors: list[torch.Tensor], label: str) -> None:
        """The host reads tensors: wait for what the current stream has enqueued, as a copy to the host would."""
        device = self.device
        with device.lock:
            spans = [span for tensor in tensors for span in self.aliases.of(tensor).spans]
            stream = device.current_stream()
            device.launch(label, reads=spans, stream=stream)
            device.synchronize(stream)

    # -- one method per kind -------------------------------------------------------------------------------

    def _defer(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        if operator.masked and _has_mask(args):
            return self._host(operator, args, kwargs)
        bound = self._bind(operator, args, kwargs)
        if operator.custom and not operator.fresh:
            return self._enqueue(operator, args, kwargs, bound, Outcome(None, {}))
        try:
            outcome = self.ladder.outcome(operator, bound.key, bound.args, bound.kwargs)
        except NoShape as missing:
            return self._shapeless(operator, args, kwargs, missing)
        except TypeError:  # an argument that cannot be hashed
            outcome = self.ladder.climb(operator, bound.args, bound.kwargs)
        if outcome.resized:
            self._fit(kwargs, outcome.resized)
            return self._defer(operator, args, kwargs)
        return self._enqueue(operator, args, kwargs, bound, outcome)

    def _random(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        bound = self._bind(operator, args, kwargs)
        try:
            start, outcome = draw(
                kwargs.get("generator"), lambda: self.ladder.rehearse(operator, bound.args, bound.kwargs)
            )
        except RuntimeError:  # its arguments decide how much it draws, or whether it may
            return self._sampler(operator, args, kwargs)
        if outcome.resized:
            self._fit(kwargs, outcome.resized)
            bound = self._bind(operator, args, kwargs)
        return self._enqueue(operator, args, kwargs, bound, outcome, start)

    def _at_once(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        return operator.call(*args, **kwargs)

    def _resize(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        tensor, like = args[0], args[1]
        self._make_room(tensor, like.shape if isinstance(like, torch.Tensor) else torch.Size(like))
        operator.call(*args, **kwargs)
        return tensor

    def _lift(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Host values arrive: a copy from pageable memory, which a capture allows for single values only."""
        tensor = args[0]
        if self.device.memory.segment_of(tensor.data_ptr()) is not None:
            return tensor
        if tensor.dim():
            self._refuse_in_capture("a copy from pageable host memory")
        return self._upload(tensor.clone(), "host to device")

    def _host(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        return self._answer(operator, args, kwargs, lambda stream, node: self.device.synchronize(stream))

    def _sampler(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        self._refuse_in_capture(f"{operator.label} draws as its input says")
        return self._answer(operator, args, kwargs, lambda stream, node: self.device.drain(node))

    def _shapeless(self, operator: Operator, args: Any, kwargs: Any, missing: NoShape) -> Any:
        refused = missing.refused()
        if refused is not None:
            raise refused
        result = self._host(operator, args, kwargs)
        self.device.unknown(f"{operator.label}: no shape without its inputs ({missing})")
        return result

    def _unmodelled(self, operator: Operator, args: Any, kwargs: Any, reason: str) -> Any:
        if not any(_elsewhere(tensor.device) for tensor in _tensors((args, list(kwargs.values())))):
            self.device.unknown(f"{operator.label}: {reason}")
            self.device.synchronize()
        return operator.call(*args, **kwargs)

    # -- enqueueing ----------------------------------------------------------------------------------------

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
            made = results.make(_new_values(operator, outcome.value))
            landing = results.landing
            if results.fills:
                device.launch("poison", (), results.spans, Poison(results.fills, results.tensors), stream)
                bound.writes += results.spans
                bound.written += results.tensors
        if operator.blank and operator.fresh:
            return made
        label = f"{operator.label} (hull)" if bound.hull else operator.label
        call = Call(operator.call, label, bound.args, bound.kwargs, landing, bound.written, self._now(), start)
        self._launch(call, bound.reads, bound.writes, stream)
        return made if not operator.written else _returned(operator, args, kwargs, made)

    def _launch(self, call: Call, reads: Any, writes: Any, stream: int) -> Node:
        if self.witness is not None:
            call.witness, call.ordinal = self.witness, self._enqueued
            self._enqueued += 1
        return self.device.launch(call.label, reads, writes, call, stream)

    def _refuse_in_capture(self, what: str) -> None:
        """Break the capture the current stream is part of, if any."""
        state = self.device.streams[self.device.current_stream()]
        if state.capture is not None:
            self.device.captures.broken(
                what,
                "do it before the capture, or replace it by an operator whose result depends on shapes only",
                state.capture,
            )

    def _upload(self, value: Any, label: str) -> Any:
        """Tensors of the device that will hold host values."""
        stream = self.device.current_stream()
        results = Results(self.device, self.aliases, stream)
        made = results.make(map_tensors(value, TensorSpec))
        call = Call(lambda: value, label, (), {}, results.landing, results.tensors, self._now())
        self._launch(call, (), results.spans, stream)
        return made

    def _answer(self, operator: Operator, args: Any, kwargs: Any, wait: Callable[[int, Node], None]) -> Any:
        """Run a call up to its result before the host goes on."""
        bound = self._bind(operator, args, kwargs)
        for name in operator.outputs & bound.kwargs.keys():
            bound.kwargs[name] = torch.empty(0, dtype=kwargs[name].dtype)
        stream = self.device.current_stream()
        answer = Answer(operator.call, operator.label, bound.args, bound.kwargs, None, bound.written, self._now())
        wait(stream, self._launch(answer, bound.reads, bound.writes, stream))
        if answer.error is not None:
            raise answer.error
        for name in operator.outputs & bound.kwargs.keys():
            self._make_room(kwargs[name], bound.kwargs[name].shape)
            kwargs[name].resize_(bound.kwargs[name].shape)
            self._defer(self._operator(torch.ops.aten.copy_.default), (kwargs[name], bound.kwargs[name]), {})
        if not operator.fresh:
            return _returned(operator, args, kwargs, None)
        return _returned(operator, args, kwargs, self._upload(_new_values(operator, answer.result), operator.label))

    def _operator(self, func: Any) -> Operator:
        return self._operators.setdefault(func, Operator(func))

    def _now(self) -> Flags:
        now = flags.current()
        if now != self._flags:
            self._flags = now
        return self._flags

    # -- tensors that grow ---------------------------------------------------------------------------------

    def _fit(self, kwargs: Any, resized: dict[str, TensorSpec]) -> None:
        """``out=`` tensors of another shape are resized at enqueue, as their shape is known then."""
        for key, spec in resized.items():
            self._make_room(kwargs[key], spec.shape)
            kwargs[key].resize_(spec.shape)

    def _make_room(self, tensor: torch.Tensor, shape: torch.Size) -> None:
        """Storage of the device large enough for `shape`; the bytes there were move with the tensor."""
        offset = tensor.storage_offset()
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - offset
        if shape.numel() <= room:
            return
        results = Results(self.device, self.aliases, self.device.current_stream())
        fresh = results.make(TensorSpec(torch.empty(shape.numel(), dtype=tensor.dtype, device="meta")))
        self.device.launch("poison", (), results.spans, Poison(results.fills, results.tensors))
        if room > 0:
            old = tensor.as_strided((room,), (1,), offset)
            self._defer(self._operator(torch.ops.aten.copy_.default), (fresh[:room], old), {})
        tensor.set_(fresh)


def _new_values(operator: Operator, value: Any) -> Any:
    """The part of a result that is new, None where an argument is returned."""
    if operator.single:
        return value
    return tuple(None if source is not None else v for source, v in zip(operator.returned, value, strict=True))


def _returned(operator: Operator, args: Any, kwargs: Any, made: Any) -> Any:
    """What the caller gets: the arguments the operator says it returns, and new values."""

    def argument(key: Key) -> Any:
        return kwargs[key] if isinstance(key, str) else args[key]

    returned = operator.returned
    if not returned:
        return None
    if operator.single:
        return made if returned[0] is None else argument(returned[0])
    return tuple(made[i] if key is None else argument(key) for i, key in enumerate(returned))


def _elsewhere(device: Any) -> bool:
    return device is not None and torch.device(device).type != "cpu"


def _has_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in MASKS for index in args[1])


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found
