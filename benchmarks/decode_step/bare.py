"""The baseline without this library's accounting: a tensor for each temporary from ``torch.empty``, nothing tracked.

The strategy `upstream` hands out the same tensors; but it keeps leases and slots of them in Python, which an engine
that never heard of leases does not. What is faster than `Bare` is faster than such an engine.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

UNREAD = frozenset({"rows", "gate_up", "down"})
"""Scratch of the routed experts that their kernels for a few rows do not touch: not charged to the baseline."""


class Fresh:
    """A stage's tensors as attributes, from acquire to release."""

    def __init__(self, kept: dict[str, Any], made: list[tuple[str, tuple[int, ...], torch.dtype]], device: Any) -> None:
        self._plan = kept, made, device

    def __enter__(self) -> Fresh:
        kept, made, device = self._plan
        own = self.__dict__
        own.update(kept)
        empty = torch.empty
        for name, shape, dtype in made:
            own[name] = empty(shape, dtype=dtype, device=device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def tensors(self) -> dict[str, Any]:
        return {name: one for name, one in self.__dict__.items() if name != "_plan"}

    def release(self) -> None:
        plan = self._plan
        self.__dict__.clear()
        self._plan = plan


class Bare:
    """A workspace of `upstream` for its streams, captures and persistent buffers; leases are `Fresh`.

    Parameters
    ----------
    idiom
        Fork in the usual way: a context of torch's for each branch, events recorded and waited for, as vLLM does.
    """

    def __init__(self, ws: Any, idiom: bool = False) -> None:
        self._ws = ws
        self._plans: dict[tuple[Any, ...], tuple[dict[str, Any], list[Any], Any]] = {}
        self._events: list[list[torch.cuda.Event]] = []
        self._depth = 0
        self._idiom = idiom
        self._torch: dict[int, torch.cuda.Stream] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ws, name)

    def lease(self, layout: Any, /, **dims: int) -> Fresh:
        key = layout, *dims.values()
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(layout.resolve(**dims))
        return Fresh(*plan)

    def _plan(self, resolved: Any) -> tuple[dict[str, Any], list[Any], Any]:
        device = self._ws.driver.device
        kept, made = {}, []
        few = resolved.layout.name == "experts" and _rows(resolved) <= 64
        for one in resolved.extents:
            if not one.nbytes or (few and one.name in UNREAD):
                kept[one.name] = torch.empty(one.shape, dtype=one.dtype, device=device)
            else:
                made.append((one.name, one.shape, one.dtype))
        return kept, made, device

    def fork(self, *streams: Any) -> Any:
        return UsualFork(self, streams) if self._idiom else self._ws.fork(*streams)

    def events(self, depth: int, count: int) -> list[torch.cuda.Event]:
        """Kept events of forks at a depth, as an engine keeps them."""
        while len(self._events) <= depth:
            self._events.append([])
        own = self._events[depth]
        while len(own) <= count:
            own.append(torch.cuda.Event())
        return own

    def torch_stream(self, stream: Any) -> torch.cuda.Stream:
        found = self._torch.get(stream.key)
        if found is None:
            found = self._torch[stream.key] = torch.cuda.ExternalStream(stream.key)
        return found


def _rows(resolved: Any) -> int:
    return next(one.shape[0] for one in resolved.extents if one.name == "rows")


class UsualFork:
    """One event of the parent that the branches wait for, one of each branch that the parent waits for."""

    def __init__(self, bare: Bare, streams: tuple[Any, ...]) -> None:
        self._bare, self._streams = bare, streams

    def __enter__(self) -> UsualFork:
        bare = self._bare
        self._own = bare.events(bare._depth, len(self._streams))
        bare._depth += 1
        self._parent = torch.cuda.current_stream()
        self._own[0].record(self._parent)
        for stream in self._streams:
            bare.torch_stream(stream).wait_event(self._own[0])
        return self

    def __call__(self, stream: Any) -> Any:
        return torch.cuda.stream(self._bare.torch_stream(stream))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bare._depth -= 1
        for event, stream in zip(self._own[1:], self._streams, strict=False):
            event.record(self._bare.torch_stream(stream))
            self._parent.wait_event(event)
