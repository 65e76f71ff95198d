"""The bench on a simulated device: real bytes under a schedule, or virtual bytes at true sizes, judged or not."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workspace.config import WorkspaceConfig
from workspace.create import create
from workspace.simulated import Device, Schedule, SimulatedGraph
from workspace.streams import CURRENT, Stream
from workspace.testing.bench import Bench, Captured, Copy
from workspace.testing.failure import ContractBroken, require
from workspace.testing.schedules import SLOW
from workspace.workspace import Workspace

SCALE = 64
GRANULARITY = 2 << 20


class HostCopy(Copy):
    """A copy in host memory; without real bytes, of nothing."""

    def __init__(self, label: str, nbytes: int) -> None:
        super().__init__(label)
        self.bytes = (ctypes.c_ubyte * nbytes)()

    def wrong(self, value: int) -> int:
        found = bytes(self.bytes)
        return len(found) - found.count(value)


class _Kernel:
    """Touches device bytes by address when it runs, as a kernel does: a graph may replay it after they were freed."""

    def __init__(self, bench: SimulatedBench, label: str, address: int, nbytes: int) -> None:
        self._bench, self._label, self._address, self._nbytes = bench, label, address, nbytes

    def __call__(self) -> None:
        if self._bench.device.memory.segment_of(self._address, self._nbytes) is None:
            self._bench.faults.append(f"{self._label}: [{self._address:#x}, +{self._nbytes}) is no device memory")
        else:
            self.touch()

    def touch(self) -> None:
        """Read or write the bytes."""
        raise NotImplementedError


class _Fill(_Kernel):
    value = 0

    def touch(self) -> None:
        ctypes.memset(self._address, self.value, self._nbytes)


class _Move(_Kernel):
    target: Any = None

    def touch(self) -> None:
        ctypes.memmove(self.target, self._address, self._nbytes)


class Replayable(Captured):
    """A simulated graph that the library was not asked about."""

    graph: SimulatedGraph

    def __init__(self, device: Device) -> None:
        self._device = device

    def replay(self) -> None:
        self.graph.launch(self._device.current_stream())

    def reset(self) -> None:
        self.graph.reset()


class _Shifted:
    """A buffer that begins some bytes into another."""

    def __init__(self, whole: Any, offset: int) -> None:
        self.whole, self.offset = whole, offset
        self.address, self.nbytes = whole.address + offset, whole.nbytes - offset


class Work:
    """An asynchronous collective: a kernel on a stream of its own, which `wait` makes the current stream wait for."""

    def __init__(self, device: Device, event: int) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        self._device.wait(self._event)


class SimulatedBench(Bench):
    """A bench on a new `Device`.

    Parameters
    ----------
    schedule
        Runs real bytes in deferred execution; None: virtual bytes at true sizes, at once.
    judged
        Log accesses. Without, leases take the steady path that a log would keep them from.
    """

    def __init__(self, strategy: str, schedule: Schedule | None, judged: bool = True) -> None:
        super().__init__(strategy, real=schedule is not None, judged=judged, full=schedule is None)
        self._schedule = schedule
        self.scale = 1 if schedule is None else SCALE
        self.device = Device(
            memory="virtual" if schedule is None else "host",
            execution="immediate" if schedule is None else "deferred",
            log=judged, sites=judged, schedule=schedule,
        )  # fmt: skip
        self._copies = 0

    def workspace(self, strategy: str | None = None, device: Any = None, **settings: Any) -> Workspace:
        chosen: dict[str, Any] = {"granularity": GRANULARITY // self.scale, "strategy": strategy or self.strategy}
        chosen |= settings
        # The config itself, so that no file or variable of the machine has a say.
        return create(config=WorkspaceConfig(**chosen), device=device or self.device)

    def raw_stream(self) -> int:
        return self.device.new_raw_stream()

    def destroy(self, raw: Any) -> None:
        self.device.destroy_stream(raw)

    # -- work ------------------------------------------------------------------------------------------------
    def fill(self, tensor: Any, value: int, stream: Any = CURRENT) -> None:
        self._fill(*extent(tensor), f"fill {value}", value, self._key(stream))

    def _fill(self, address: int, nbytes: int, label: str, value: int, key: int | None, *, reads: bool = False) -> None:
        kernel = None
        if self.real and nbytes:
            kernel = _Fill(self, label, address, nbytes)
            kernel.value = value
        span = ((address, nbytes),)
        self.device.launch(label, span if reads else (), span, kernel, key)

    def copy(self, tensor: Any, stream: Any = CURRENT) -> HostCopy:
        address, nbytes = extent(tensor)
        self._copies += 1
        copy = HostCopy(f"copy {self._copies}", nbytes if self.real else 0)
        kernel = None
        if self.real and nbytes:
            kernel = _Move(self, copy.label, address, nbytes)
            kernel.target = copy.bytes
        self.device.launch(copy.label, ((address, nbytes),), (), kernel, self._key(stream))
        return copy

    def slow(self, stream: Any = CURRENT) -> None:
        self.device.launch(SLOW, stream=self._key(stream))

    def settle(self) -> None:
        self.device.drain()

    def _key(self, stream: Any) -> int | None:
        if stream is CURRENT:
            return None
        return stream.key if isinstance(stream, Stream) else self.ws.driver.stream_key(stream)

    # -- order -----------------------------------------------------------------------------------------------
    def order(self, before: Any, after: Any) -> None:
        event = self.device.new_event()
        self.device.record(event, self._key(before))
        self.device.wait(event, self._key(after))

    def record_stream(self, tensor: Any, stream: Stream) -> None:
        self.device.record_stream(self.tensor(tensor), stream.key)

    def collective(self, tensor: Any, value: int) -> Work:
        device, stream = self.device, self.device.new_stream("collective")
        start, end = device.new_event(), device.new_event()
        device.record(start)
        device.wait(start, stream)
        device.launch(SLOW, stream=stream)
        self._fill(*extent(tensor), "all-reduce", value, stream, reads=True)
        device.record(end, stream)
        return Work(device, end)

    @contextmanager
    def foreign_capture(self, stream: Stream) -> Iterator[Replayable]:
        captured = Replayable(self.device)
        self.device.begin_capture(stream.key)
        try:
            with self.device.on(stream.key):
                yield captured
        except BaseException:
            self.device.abort_capture(stream.key)
            raise
        captured.graph = self.device.end_capture(stream.key)

    # -- memory ----------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> Any:
        return self.device.empty((nbytes,), torch.uint8)

    def empty_cache(self) -> None:
        self.device.empty_cache()

    def reserved(self) -> int:
        return self.device.statistics.reserved

    def fill_at(self, address: int, nbytes: int, value: int) -> None:
        self._fill(address, nbytes, f"fill {value}", value, None)

    def owns(self, address: int) -> bool:
        return self.device.memory.segment_of(address) is not None

    def past(self, whole: Any, nbytes: int) -> _Shifted:
        return _Shifted(whole, nbytes)

    @contextmanager
    def device_capacity(self, nbytes: int) -> Iterator[None]:
        memory = self.device.memory
        before, memory.capacity = memory.capacity, nbytes
        try:
            yield
        finally:
            memory.capacity = before

    def another(self) -> SimulatedBench:
        return SimulatedBench(self.strategy, self._schedule, self.judged)

    # -- seeing ----------------------------------------------------------------------------------------------
    def calls(self) -> Counter[str]:
        return Counter(self.device.counters)

    def detect(self, first: str, second: str) -> None:
        for race in self.device.races():
            if {race.first.label, race.second.label} == {first, second}:
                break
        else:
            raise ContractBroken(f"no race between {first!r} and {second!r} is reported: {self.device.races()}")
        text = str(race)
        for side in (race.first, race.second):
            require(side.stream_name in text and side.site, f"the report lacks a stream or a call site:\n{text}")
        require(f"stream {race.second.stream} knows stream" in text, f"the missing edge is not named:\n{text}")
        self.detected = True

    def verdict(self) -> str:
        return self.device.verdict()

    def objection(self) -> str:
        for found in (*self.device.races(), *self.device.late()):
            return str(found)
        return "; ".join(self.device.judge.unmodelled if self.device.judge else ())


def extent(tensor: Any) -> tuple[int, int]:
    """First byte and bytes of a tensor, or of a slot's."""
    if hasattr(tensor, "tensor"):
        tensor = tensor.tensor()
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
