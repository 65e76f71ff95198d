"""Queued calls: the functions of the executor's nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workspace.errors import DriverError
from workspace.simulated.flags import Flags
from workspace.simulated.random_state import Draw

Witness = Callable[["Call"], None]


class Call:
    """An operator with aliased arguments. It may run many times (a captured one runs at each replay).

    Parameters
    ----------
    call, label
        The operator.
    args, kwargs
        Its arguments, tensors aliased and lists copied.
    landing
        Aliases of its outputs, in the structure of its result; new values are copied into them. None when it writes its
        arguments and returns nothing new.
    written
        Aliases of everything it writes.
    flags
        Global settings of the moment of enqueue.
    draw
        The generator and the state it starts from, for a random operator.
    """

    __slots__ = ("args", "call", "draw", "flags", "kwargs", "label", "landing", "ordinal", "witness", "written")

    def __init__(
        self,
        call: Callable[..., Any],
        label: str,
        args: Any,
        kwargs: Any,
        landing: Any,
        written: list[torch.Tensor],
        flags: Flags,
        draw: Draw | None = None,
    ) -> None:
        self.call = call
        self.label = label
        self.args = args
        self.kwargs = kwargs
        self.landing = landing
        self.written = written
        self.flags = flags
        self.draw = draw
        self.witness: Witness | None = None
        self.ordinal = 0

    def __call__(self) -> None:
        if self.draw is None:
            result = self.call(*self.args, **self.kwargs)
        else:
            with self.draw:
                result = self.call(*self.args, **self.kwargs)
        if self.landing is not None:
            land(result, self.landing, self.label)
        if self.witness is not None:
            self.witness(self)

    def replayed(self) -> Call:
        """The call of one replay: random numbers continue from the generator's present state, as on CUDA."""
        if self.draw is None:
            return self
        again = Call(self.call, self.label, self.args, self.kwargs, self.landing, self.written, self.flags,
                     self.draw.advanced())  # fmt: skip
        again.witness, again.ordinal = self.witness, self.ordinal
        return again


class Answer(Call):
    """A call whose result the host waits for; an error it raises is the caller's, not the device's."""

    __slots__ = ("error", "result")

    def __call__(self) -> None:
        self.error: Exception | None = None
        self.result: Any = None
        try:
            self.result = self.call(*self.args, **self.kwargs)
        except Exception as error:
            self.error = error
        if self.witness is not None:
            self.witness(self)


def land(result: Any, landing: Any, label: str) -> None:
    """Copy the values of a result into the tensors that were handed out for them at enqueue."""
    if isinstance(landing, torch.Tensor):
        if result.shape != landing.shape or result.dtype != landing.dtype:
            raise DriverError(
                f"{label} returned {tuple(result.shape)} {result.dtype}, its shape function promised "
                f"{tuple(landing.shape)} {landing.dtype}",
                "correct the operator's fake kernel",
            )
        landing.copy_(result)
    elif isinstance(landing, (list, tuple)):
        for value, place in zip(result, landing, strict=True):
            land(value, place, label)
