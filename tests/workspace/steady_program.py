"""Seeded programs of leases, forks and branches, and everything one leaves behind: the same in either form."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import torch

import workspace
from workspace import Layout, spec
from workspace.errors import DriverError
from workspace.simulated import Device

WIDE = Layout("wide", **{f"t{index}": spec("T", 8, dtype=torch.float32) for index in range(5)})
PAIR = Layout("pair", a=spec("T", dtype=torch.uint8), b=spec(4, dtype=torch.int32))
NONE = Layout("none", e=spec(0, dtype=torch.uint8))
VERBS = ("record", "wait", "set_stream", "empty", "record_use", "new_event", "memset")


class Program:
    """One program on a device of its own.

    Attributes
    ----------
    calls
        Verbs of the driver with their arguments, in order, tensors left out; and where each lease lies.
    """

    def __init__(self, strategy: str, seed: int, *, locked: bool = False, **settings: Any) -> None:
        self.device = Device(memory="virtual")
        driver = self.device.driver()
        driver.attributes = False  # as on a GPU: repeated leases take the steady path
        self.calls: list[tuple[Any, ...]] = []
        for verb in VERBS:
            self._listen(driver, verb)
        self.ws = workspace.create(strategy, device=self.device, allow_unsafe=True, **settings)
        if locked:
            for layout in (WIDE, PAIR):
                self.ws.declare(layout, T=64, count=32)
            self.ws.reserve()
            self.ws.lock()
        self.choose = random.Random(seed)
        self.streams = [self.ws.stream(f"s{number}") for number in range(4)]
        self.kept: list[Any] = []

    def _listen(self, driver: Any, verb: str) -> None:
        inner = getattr(driver, verb)

        def heard(*arguments: Any) -> Any:
            self.calls.append((verb, *(one for one in arguments if isinstance(one, int | tuple | torch.dtype))))
            return inner(*arguments)

        setattr(driver, verb, heard)

    def run(self, steps: int = 40) -> tuple[Any, ...]:
        """Run it; returns what must not depend on the form."""
        with torch.no_grad():
            for _ in range(steps):
                self._step(0)
            for lease in self.kept:
                lease.release()
        timeline, clocks = self.ws.timeline, self.ws.timeline.clocks
        held = self.ws.provider.held()
        known = {stream: (clock.epoch, dict(clock.seen), clock.waited) for stream, clock in clocks.of.items()}
        counts = [getattr(self.ws.strategy_object, name, None) for name in ("allocated", "elided", "recorded")]
        return (
            self.calls, known, dict(clocks.host), list(timeline.state.held), held, counts,
            self.device.verdict(), timeline.fences,
        )  # fmt: skip

    def _step(self, depth: int) -> None:
        choose = self.choose
        action = choose.choice(("lease", "lease", "on", "fork", "fork", "keep", "drop", "raise"))
        if action == "lease":
            with self._lease() as lease:
                self._use(lease)
                if depth < 3 and choose.random() < 0.6:
                    self._step(depth + 1)
                self._use(lease)
        elif action == "on":
            with self.ws.on(choose.choice(self.streams)):
                self._use_new()
        elif action == "fork" and depth < 3:
            self._fork(depth)
        elif action == "keep":
            lease = self._lease()
            lease.__enter__()
            self._use(lease)
            self.kept.append(lease)
        elif action == "drop" and self.kept:
            self.kept.pop(choose.randrange(len(self.kept))).release()
        elif action == "raise":
            try:
                with self._lease(), self.ws.on(choose.choice(self.streams)):
                    raise DriverError("raised by the program", "go on")
            except DriverError:
                pass

    def _fork(self, depth: int) -> None:
        current = self.ws.timeline.current()
        others = [one for one in self.streams if one.key != current.key]
        branches = self.choose.sample(others, self.choose.randrange(1, 4))
        with ExitStack() as stack:
            branch = stack.enter_context(self.ws.fork(*branches))
            for stream in branches:
                with branch(stream):
                    self._use_new()
                    if depth < 2 and self.choose.random() < 0.4:
                        self._step(depth + 1)
            if self.choose.random() < 0.3 and self.kept:
                self.kept[-1].use(self.choose.choice(branches))

    def _lease(self) -> Any:
        layout = self.choose.choice((WIDE, WIDE, PAIR, NONE))
        return self.ws.lease(layout) if layout is NONE else self.ws.lease(layout, T=self.choose.choice((1, 2, 64)))

    def _use_new(self) -> None:
        with self._lease() as lease:
            self._use(lease)

    def _use(self, lease: Any) -> None:
        names = list(lease.request.index)
        some = self.choose.sample(names, self.choose.randrange(1, len(names) + 1))
        tensors = lease.allocate(*some) if self.choose.random() < 0.5 else [getattr(lease, name) for name in some]
        self.device.launch("use", reads=tensors[:1], writes=tensors[1:])
        self.calls.append(("address", lease.address))
        assert bool(lease.address) == (self.ws.provider.lends_tensors and lease.request.payload > 0)


class CapturedProgram(Program):
    """The same steps inside captures of one stream; graphs are replayed between them."""

    def __init__(self, strategy: str, seed: int, **settings: Any) -> None:
        super().__init__(strategy, seed, **settings)
        for layout in (WIDE, PAIR):
            self.ws.declare(layout, T=64, lane="main", count=16)
            self.ws.declare(layout, T=64, count=16)
        self.ws.reserve()
        self.graphs: list[Any] = []
        self.capturing = False

    def _step(self, depth: int) -> None:
        if self.capturing:  # what is enqueued on another stream there has to be joined
            if depth < 3 and self.choose.random() < 0.6:
                self._fork(depth)
            else:
                self._use_new()
        elif depth:
            super()._step(depth)
        else:
            with self.ws.on(self.streams[0]):
                self._capture()

    def _capture(self) -> None:
        for _ in range(2):
            self._step(1)  # uses of before, and leases that are held on
        with self.ws.capture() as capture:
            self.capturing = True
            for _ in range(3):
                self._step(1)
            self.capturing = False
        self.graphs.append(capture.graph)
        self.choose.choice(self.graphs).replay()
