"""The simulated devices of a sweep: one that is timed, one that is judged and sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from workspace.simulated import Device
from workspace.simulated.device import FINISHED
from workspace.simulated.node import Node
from workspace.slot import Slot
from workspace.sweep.result import Sample


class TorchBuffer:
    """Bytes of torch's allocator on the CPU, never touched."""

    __slots__ = ("__weakref__", "_tensor", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self._tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.address = self._tensor.data_ptr()
        self.nbytes = nbytes


class TimedDevice(Device):
    """A device for timing the host: no log, and operations and allocations that cost what they would.

    The simulated caching allocator is written in Python, so an allocation is a ``torch.empty`` on the CPU
    instead. Without a log a launch does not look at its tensors. An operator would: an empty slot gets its
    tensor then, and that allocation is part of the strategy's cost.
    """

    def alloc(self, nbytes: int, stream: int | None = None) -> Any:
        """Bytes by ``torch.empty``."""
        self.counters["alloc"] += 1
        return TorchBuffer(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: int | None = None) -> Any:
        """One ``torch.empty``."""
        self.counters["alloc"] += 1
        return torch.empty(shape, dtype=dtype)

    def memset(self, address: int, nbytes: int, value: int, stream: int | None = None) -> None:
        """Nothing: the bytes are not looked at."""
        self.counters["memset"] += 1

    def record(self, event: int, stream: int | None = None) -> None:
        """Counted; what it orders matters to a capture only, as nobody judges and nothing is freed late."""
        if self.captures:
            super().record(event, stream)
        else:
            self.counters["record"] += 1

    def wait(self, event: int, stream: int | None = None) -> None:
        """Counted, like `record`."""
        if self.captures:
            super().wait(event, stream)
        else:
            self.counters["wait"] += 1

    def record_stream(self, memory: Any, stream: int) -> bool:
        """Nothing: torch's allocator on the CPU has no streams."""
        self.counters["record_stream"] += 1
        return True

    def launch(
        self,
        label: str,
        reads: Iterable[Any] = (),
        writes: Iterable[Any] = (),
        fn: Callable[[], Any] | None = None,
        stream: int | None = None,
    ) -> Node:
        """Enqueue an operation; slots among its tensors are filled."""
        for tensors in (reads, writes):
            for tensor in tensors:
                if type(tensor) is Slot:
                    tensor.tensor()
        if fn is None and not self.captures:
            self.counters["launch"] += 1
            return FINISHED
        return super().launch(label, reads, writes, fn, stream)


class JudgedDevice(Device):
    """Virtual memory under the clock check; `sample`, when set, is called after each operation.

    Attributes
    ----------
    accesses
        Byte ranges shown to the check; a replayed graph shows its ranges once, merged.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(memory="virtual", seed=seed, log=True)
        self.accesses = 0
        self.sample: Callable[[], None] | None = None

    def submit(self, *args: Any, **kwargs: Any) -> Node:
        """Enqueue a node, counting its accesses."""
        node = super().submit(*args, **kwargs)
        self.accesses += len(node.reads) + len(node.writes)
        return node

    def launch(self, *args: Any, **kwargs: Any) -> Node:
        """Enqueue an operation, then call `sample`."""
        node = super().launch(*args, **kwargs)
        if self.sample is not None:
            self.sample()
        return node


class Sampler:
    """Collects, for each step, the fullest moment, and for one step every moment up to a length.

    Parameters
    ----------
    ws
        The workspace on a `JudgedDevice`.
    detailed
        Index of the step to keep in detail.
    length
        Moments to keep of it.
    """

    def __init__(self, ws: Any, detailed: int, length: int) -> None:
        self.ws, self.detailed, self.length = ws, detailed, length
        self.envelope: list[Sample] = []
        self.detail: list[Sample] = []

    def run(self, runner: Any, step: Any) -> None:
        """Replay a step, sampling at each operation."""
        fullest: Sample | None = None
        launches = 0

        def sample() -> None:
            nonlocal fullest, launches
            launches += 1
            detailed = step.index == self.detailed and launches <= self.length
            snapshot = self.ws.snapshot()
            if fullest is not None and snapshot.allocated <= fullest.allocated and not detailed:
                return
            owners = {name: owner.allocated for name, owner in snapshot.owners.items() if owner.allocated}
            held = self.ws.device.statistics.reserved
            moment = Sample(step.index, launches, snapshot.allocated, held, owners)
            if fullest is None or moment.allocated > fullest.allocated:
                fullest = moment
            if detailed:
                self.detail.append(moment)

        self.ws.device.sample = sample
        try:
            runner.run(step)
        finally:
            self.ws.device.sample = None
        if fullest is not None:
            self.envelope.append(fullest)
