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

from workspace.simulated.aliases import Opaque
from workspace.simulated.call import Answer
from workspace.simulated.enqueue import Enqueueing, new_values, returned
from workspace.simulated.execution import run
from workspace.simulated.lendings import Use, carry, lending_of
from workspace.simulated.operators import Kind, Operator, decompose
from workspace.simulated.random_state import draw
from workspace.simulated.replays import Replays
from workspace.simulated.shapes import NoShape, Outcome, ShapeLadder, map_tensors

if TYPE_CHECKING:
    from workspace.simulated.device import Device
    from workspace.simulated.dispatch import Dispatch
    from workspace.simulated.node import Node

MASKS = (torch.bool, torch.uint8)

LADDER = ShapeLadder()
OPERATORS: dict[int, Operator] = {}
"""By id, as hashing an overload takes a Python call; each keeps its overload, so that no id comes twice. These and the
shapes depend on operators only: all devices of a process share them."""


class Executor(Enqueueing):
    """Decides what becomes of each operator call of one device. Threads reach it through their `Dispatch` mode.

    Parameters
    ----------
    device
        Whose queue, allocator and clocks to use.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._replays = Replays(device)
        device.executor = self
        device.queue.execute = run
        self._routes: dict[Kind, Callable[[Operator, Any, Any], Any]] = {
            Kind.RANDOM: self._random,
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
        operator = OPERATORS.get(id(func)) or self._operator(func)
        kind = operator.kind
        if kind is Kind.IMMEDIATE:
            return carry(operator.call(*args, **kwargs), args)
        if kind is Kind.COMPOSITE:
            with mode:
                return decompose(func, args, kwargs)
        if operator.device and _elsewhere(kwargs.get("device")):
            return operator.call(*args, **kwargs)
        try:
            with self.device.lock:
                if kind is Kind.DEFERRED:
                    return self._defer(operator, args, kwargs)
                return self._routes[kind](operator, args, kwargs)
        except Opaque as opaque:
            return self._unmodelled(operator, args, kwargs, str(opaque))

    def read(self, tensors: list[torch.Tensor], label: str) -> None:
        """The host reads tensors: wait for what the current stream has enqueued, as a copy to the host would."""
        device = self.device
        with device.lock:
            spans = [span for tensor in tensors for span in self.aliases.of(tensor).spans]
            stream = device.current_stream()
            lent = [Use(one, self.aliases.of(tensor).spans, False) for tensor in tensors if (one := lending_of(tensor))]
            device.judged(device.launch(label, reads=spans, stream=stream), lent)
            device.synchronize(stream)

    # -- one method per kind -------------------------------------------------------------------------------

    def _defer(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        if operator.masked and _has_mask(args):
            return self._host(operator, args, kwargs)
        bound = self._bind(operator, args, kwargs)
        if operator.custom and not operator.fresh:
            return self._enqueue(operator, args, kwargs, bound, Outcome(None, {}))
        try:
            outcome = LADDER.outcome(operator, bound.key, bound.args, bound.kwargs)
        except NoShape as missing:
            return self._shapeless(operator, args, kwargs, missing)
        except TypeError:  # an argument that cannot be hashed
            outcome = LADDER.climb(operator, bound.args, bound.kwargs)
        if outcome.resized:
            self._fit(kwargs, outcome.resized)
            return self._defer(operator, args, kwargs)
        return self._enqueue(operator, args, kwargs, bound, outcome)

    def _random(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        bound = self._bind(operator, args, kwargs)
        try:
            start, outcome = draw(kwargs.get("generator"), lambda: LADDER.rehearse(operator, bound.args, bound.kwargs))
        except RuntimeError:  # its arguments decide how much it draws, or whether it may
            return self._sampler(operator, args, kwargs)
        capture = self.device.capture_of(self.device.current_stream())
        if capture:
            start.rewind()  # nothing is drawn before the graph is launched
            self._replays.draws(capture)
        if outcome.resized:
            self._fit(kwargs, outcome.resized)
            bound = self._bind(operator, args, kwargs)
        return self._enqueue(operator, args, kwargs, bound, outcome, start)

    def _resize(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        tensor, like = args[0], args[1]
        self._make_room(tensor, like.shape if isinstance(like, torch.Tensor) else torch.Size(like))
        operator.call(*args, **kwargs)
        return tensor

    def _lift(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Host values arrive: a copy from pageable memory, which a capture allows for single values only."""
        tensor = args[0]
        if _elsewhere(tensor.device) or self.owns(tensor):
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

    # -- the host waits ----------------------------------------------------------------------------------

    def _answer(self, operator: Operator, args: Any, kwargs: Any, wait: Callable[[int, Node], None]) -> Any:
        """Run a call up to its result before the host goes on."""
        bound = self._bind(operator, args, kwargs)
        for name in operator.outputs & bound.kwargs.keys():
            bound.kwargs[name] = torch.empty(0, dtype=kwargs[name].dtype)
        stream = self.device.current_stream()
        answer = Answer(operator.call, operator.label, bound.args, bound.kwargs, None, bound.written, self._now())
        wait(stream, self._launch(answer, bound.reads, bound.writes, stream, bound.lent))
        if answer.error is not None:
            raise answer.error
        for name in operator.outputs & bound.kwargs.keys():
            self._make_room(kwargs[name], bound.kwargs[name].shape)
            kwargs[name].resize_(bound.kwargs[name].shape)
            self._copy(kwargs[name], bound.kwargs[name])
        if not operator.fresh:
            return returned(operator, args, kwargs, None)
        return returned(operator, args, kwargs, self._upload(new_values(operator, answer.result), operator.label))

    def _refuse_in_capture(self, what: str) -> None:
        """Break the capture the current stream is part of, if any."""
        state = self.device.streams[self.device.current_stream()]
        if state.capture is not None:
            self.device.captures.broken(
                what,
                "do it before the capture, or replace it by an operator whose result depends on shapes only",
                state.capture,
            )

    def _operator(self, func: Any) -> Operator:
        return OPERATORS.setdefault(id(func), Operator(func))


def _elsewhere(device: Any) -> bool:
    return device is not None and torch.device(device).type != "cpu"


def _has_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in MASKS for index in args[1])


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found
