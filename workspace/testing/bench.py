"""The bench a scenario runs on: one device, the strategy under test, and verbs that mean the same on every driver."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from workspace.graph import Graph
from workspace.layout import Layout, spec
from workspace.streams import CURRENT, Stream
from workspace.testing.failure import require
from workspace.workspace import Workspace

BLOCK = Layout("block", data=spec("N", dtype=torch.uint8))
OTHER = Layout("other", data=spec("N", dtype=torch.uint8))
"""Layouts of one tensor of `N` bytes; two, so that owners can be told apart."""


class Copy:
    """Bytes that an enqueued copy takes from the device to a place of its own, looked at when the bench is idle."""

    def __init__(self, label: str) -> None:
        self.label = label

    def wrong(self, value: int) -> int:
        """How many bytes differ from `value`."""
        raise NotImplementedError


class Captured(ABC):
    """A graph captured without the library: what ``torch.cuda.graph`` leaves."""

    @abstractmethod
    def replay(self) -> None:
        """Enqueue it on the current stream, without telling the library."""

    @abstractmethod
    def reset(self) -> None:
        """Destroy it."""


class Bench(ABC):
    """What a scenario is written against.

    A scenario fills leases, copies them out on any stream, delays streams, and states what each copy must hold. The
    harness compares after a device synchronisation. Streams: `main` is current when a scenario begins.

    Attributes
    ----------
    strategy
        Name of the strategy under test.
    real
        Whether bytes exist; without, only order is judged.
    judged
        Whether the device tells races.
    full
        Whether to run true sizes and counts; otherwise sizes and counts are scaled down.
    expects
        Copies with the value each must hold.
    faults
        Kernels that touched bytes which are not the device's.
    segment
        Bytes that the framework's allocator may take from the device beyond what it is asked for.
    detected
        A scenario has found the race it provoked, so that the final verdict is not held against it.
    """

    scale = 1
    segment = 2 << 20

    def __init__(self, strategy: str, real: bool, judged: bool, full: bool) -> None:
        self.strategy = strategy
        self.real = real
        self.judged = judged
        self.full = full
        self.expects: list[tuple[Copy, int]] = []
        self.detected = False
        self.faults: list[str] = []
        self._workspace: Workspace | None = None
        self._closing: list[Callable[[], None]] = []

    # -- workspaces and streams ------------------------------------------------------------------------------
    @property
    def ws(self) -> Workspace:
        """The workspace under test, made with default settings at first use."""
        if self._workspace is None:
            self._workspace = self.workspace()
        return self._workspace

    @abstractmethod
    def workspace(self, strategy: str | None = None, **settings: Any) -> Workspace:
        """Another workspace on the bench's device; sizes in `settings` are real bytes."""

    @property
    def main(self) -> Stream:
        """S0."""
        return self.ws.stream("main")

    def streams(self, count: int) -> list[Stream]:
        """S1, S2, ..."""
        return [self.ws.stream(f"side{number}") for number in range(1, count + 1)]

    @abstractmethod
    def raw_stream(self) -> Any:
        """A stream made without the library, which may be destroyed."""

    @abstractmethod
    def destroy(self, raw: Any) -> None:
        """Destroy a raw stream; what was enqueued on it still runs."""

    # -- sizes -----------------------------------------------------------------------------------------------
    def mib(self, count: float) -> int:
        """So many MiB in bytes, scaled down on a bench that pays for each byte."""
        return int(count * 2**20) // self.scale

    def times(self, count: int) -> int:
        """So many repeats, fewer on a bench that runs the scenario many times."""
        return count if self.full else min(count, 3)

    def reserve(self, ws: Workspace, nbytes: int, *, lane: str | None = "main", count: int = 1) -> None:
        """Hold bytes for `count` leases of BLOCK at once, inside captures of a lane or (None) eager."""
        ws.declare(BLOCK, N=nbytes, lane=lane, count=count)
        ws.reserve()

    # -- work ------------------------------------------------------------------------------------------------
    @abstractmethod
    def fill(self, tensor: Any, value: int, stream: Any = CURRENT) -> None:
        """Enqueue a kernel that writes `value` to each byte."""

    @abstractmethod
    def copy(self, tensor: Any, stream: Any = CURRENT) -> Copy:
        """Enqueue a kernel that reads each byte; in a capture, the copy is taken again at each replay."""

    @abstractmethod
    def slow(self, stream: Any = CURRENT) -> None:
        """Delay a stream so that everything the host enqueues meanwhile is waiting."""

    def expect(self, copy: Copy, value: int) -> None:
        """State what a copy must hold once the device is idle."""
        self.expects.append((copy, value))

    def check(self) -> None:
        """Let the device go idle, compare the copies so far, and forget them. Orders nothing for the library."""
        self.settle()
        if self.faults:
            raise Corrupted(self.faults[0])
        expects, self.expects = self.expects, []
        for copy, value in expects:
            wrong = copy.wrong(value) if self.real else 0
            if wrong:
                raise Corrupted(f"{copy.label}: {wrong} bytes are not {value}")

    @abstractmethod
    def settle(self) -> None:
        """Let the device go idle without telling the library."""

    def soon(self, condition: Callable[[], bool]) -> bool:
        """Whether a condition holds that depends on graphs being gone, which a GPU says a moment later."""
        return condition()

    def address(self, tensor: Any) -> int:
        """First byte of a tensor (or of a slot's)."""
        return self.ws.driver.address_of(self.tensor(tensor))

    @staticmethod
    def tensor(tensor: Any) -> Any:
        """The tensor itself, also of a slot, which ends with its lease."""
        return tensor.tensor() if hasattr(tensor, "tensor") else tensor

    def graph(self, ws: Workspace, value: int, nbytes: int, lane: str | None = None) -> tuple[Graph, Copy]:
        """Capture on the current stream: lease, fill with `value`, copy out late. The copy must hold `value`."""
        with ws.capture(lane=lane) as capture, ws.lease(BLOCK, N=nbytes) as lease:
            self.fill(lease.data, value)
            self.slow()
            copy = self.copy(lease.data)
        return capture.graph, copy

    def in_thread(self, *bodies: Callable[[], None]) -> None:
        """Run bodies at once, each in a thread of its own on S0; what one raises is raised here."""
        failures: list[BaseException] = []

        def guarded(body: Callable[[], None]) -> None:
            try:
                # Grad mode and the current stream belong to a thread.
                with torch.no_grad(), self.ws.on(self.main):
                    body()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in failures:
            raise error

    # -- order made without the library ------------------------------------------------------------------------
    @abstractmethod
    def order(self, before: Any, after: Any) -> None:
        """Make the second stream wait for the first by an event the library does not know."""

    @abstractmethod
    def record_stream(self, tensor: Any, stream: Stream) -> None:
        """``tensor.record_stream(stream)``."""

    @abstractmethod
    def collective(self, tensor: Any, value: int) -> Any:
        """Start an asynchronous collective that rewrites the tensor with `value`; returns the work to wait for."""

    @abstractmethod
    def foreign_capture(self, stream: Stream) -> AbstractContextManager[Captured]:
        """Capture a stream without the library; the graph is complete when the block ends."""

    # -- memory outside the library ----------------------------------------------------------------------------
    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """``torch.empty`` of bytes on the current stream."""

    @abstractmethod
    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""

    @abstractmethod
    def reserved(self) -> int:
        """Bytes the framework's allocator holds of the device, whoever asked for them."""

    @abstractmethod
    def fill_at(self, address: int, nbytes: int, value: int) -> None:
        """As `fill`, of any device bytes, on the current stream."""

    @abstractmethod
    def owns(self, address: int) -> bool:
        """Whether the address is the bench's device's."""

    @abstractmethod
    def past(self, whole: Any, nbytes: int) -> Any:
        """A buffer that begins so many bytes into another."""

    @contextmanager
    def offset_bases(self, nbytes: int) -> Iterator[None]:
        """In it, the framework's allocator hands out bases that are so many bytes past an aligned address."""
        driver: Any = self.ws.driver
        alloc = driver.alloc
        driver.alloc = lambda size, stream: self.past(alloc(size + nbytes, stream), nbytes)
        try:
            yield
        finally:
            driver.alloc = alloc

    @abstractmethod
    def device_capacity(self, nbytes: int) -> AbstractContextManager[None]:
        """In it, the device has so many bytes."""

    @abstractmethod
    def another(self) -> Bench:
        """A bench of the same kind on a second device."""

    # -- seeing ----------------------------------------------------------------------------------------------
    @abstractmethod
    def calls(self) -> Counter[str]:
        """Calls of the device so far, by verb."""

    @abstractmethod
    def detect(self, first: str, second: str) -> None:
        """Require a reported race between two labels that names streams, owner and both call sites."""

    @abstractmethod
    def verdict(self) -> str:
        """``SAFE``, ``UNSAFE`` or ``UNKNOWN``."""

    @abstractmethod
    def objection(self) -> str:
        """A race so far, or what was not modelled; empty for neither. A scenario may be about no operation at all."""

    def no_race(self) -> None:
        """Require that nothing so far raced, and that everything shown was modelled."""
        if self.judged:
            objection = self.objection()
            require(not objection, f"the clock check says {self.verdict()}: {objection}")

    # -- life ------------------------------------------------------------------------------------------------
    def cleanup(self, step: Callable[[], None]) -> None:
        """Something to do after the scenario, however it ends."""
        self._closing.append(step)

    def close(self) -> None:
        """Undo what scenarios left behind."""
        while self._closing:
            self._closing.pop()()


class Corrupted(AssertionError):
    """A copy holds other bytes than it must."""
