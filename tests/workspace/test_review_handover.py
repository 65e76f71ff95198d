"""Hand-overs in C++ alone, and with the driver's verbs as C functions at addresses, as libcuda has them."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_int, c_uint, c_uint64, c_void_p, cast
from typing import Any

import pytest

from tests.workspace.forms import BOTH
from tests.workspace.scene import BYTES, OTHER, SLAB, scene, write
from workspace import native
from workspace.errors import DriverError
from workspace.handover import hand_over
from workspace.lease import Lease
from workspace.simulated import Device
from workspace.timeline import Timeline
from workspace.workspace import Workspace

pytestmark = pytest.mark.skipif(not native.built(), reason="the C++ form is not built")

SMALL = 1024
RECORD = CFUNCTYPE(c_int, c_void_p, c_void_p)
WAIT = CFUNCTYPE(c_int, c_void_p, c_void_p, c_uint)
INFO = CFUNCTYPE(c_int, c_void_p, POINTER(c_int), POINTER(c_uint64), *(c_void_p,) * 4)


class Python(Exception):
    """The Python form was asked to hand over."""


@pytest.fixture(autouse=True)
def only_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that finds nothing on its stream's shelf goes the C++ way or, where it is to, the long one."""
    monkeypatch.setattr("workspace.lease.hand_over", _raise)


def _raise(*_: object) -> None:
    raise Python


class Libcuda:
    """The verbs of a simulated device as C functions; a handle is the key behind a bit."""

    def __init__(self, device: Device) -> None:
        driver: Any = device.driver()
        make = native.extension()
        self.calls: list[str] = []
        self.codes: dict[str, int] = {}
        self.capturing: tuple[int, int] | None = None
        self.inner = driver.record, driver.wait, driver.capture_of
        self.functions = (RECORD(self._record), WAIT(self._wait), INFO(self._info))
        self.handles: dict[int, int] = {}
        new_stream = driver.new_stream

        def known(name: str) -> int:
            key = new_stream(name)
            self.handles[key] = 1 << 40 | key
            return key

        driver.new_stream = known
        record, wait, info = (cast(one, c_void_p).value for one in self.functions)
        driver.record = make.record(record, self.handles, False, driver.record)
        driver.wait = make.wait(wait, self.handles, False, driver.wait)
        driver.capture_of = make.capture_of(info, self.handles, False, driver.capture_of)

    def _record(self, event: int, stream: int) -> int:
        return self._call("record", lambda: self.inner[0](event, stream & ~(1 << 40)))

    def _wait(self, stream: int, event: int, flags: int) -> int:
        return self._call("wait", lambda: self.inner[1](event, stream & ~(1 << 40)))

    def _info(self, stream: int, status: Any, identity: Any, *_: None) -> int:
        found = self.inner[2](stream & ~(1 << 40))
        status[0], identity[0] = self.capturing or (bool(found), found)
        return self._call("capture_of", int)

    def _call(self, name: str, verb: Callable[[], object]) -> int:
        self.calls.append(name)
        if not self.codes.get(name):
            verb()
        return max(self.codes.get(name, 0), 0)


def addressed() -> tuple[Device, Workspace, Libcuda]:
    device, ws = scene(steady=True, policy="fence")
    libcuda = Libcuda(device)
    ws.declare(BYTES, N=SLAB)
    ws.reserve()
    return device, ws, libcuda


def primed(ws: Workspace) -> Any:
    """The pool, whose largest free block is known, as after any long way."""
    strategy: Any = ws.strategy_object
    strategy.pool.largest()
    return strategy.pool


def crowded(blocks: int) -> tuple[Device, Workspace, Lease]:
    """A pool with room for so many small blocks beside a lease, which is returned."""
    device, ws = scene(steady=True, policy="fence", reserve=SLAB)
    return device, ws, ws.acquire(BYTES, N=SLAB - blocks * SMALL)


@pytest.mark.parametrize("without", [None, "record", "wait"])
def test_a_fence_is_three_calls(without: str | None) -> None:
    """Whether the owner captures, its record, the other's wait; the control says that one was made and makes none."""
    device, ws, libcuda = addressed()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    if without is not None:
        libcuda.codes[without] = -1
    for turn in range(3):
        for stream in (two, one):
            primed(ws)
            libcuda.calls.clear()
            write(device, ws, f"{stream.name} {turn}", SLAB, stream)
            assert libcuda.calls == ["capture_of", "record", "wait"]
    assert (device.verdict() == "SAFE") == (without is None)
    assert ws.snapshot().fences == 6


def test_a_fence_that_was_made_is_known() -> None:
    """Of two blocks with one last use the second needs none."""
    device, ws, libcuda = addressed()
    one, two = ws.stream("one"), ws.stream("two")
    beside = ws.acquire(BYTES, N=SLAB - 2 * SMALL)
    with ws.on(one), ws.lease(BYTES, N=SMALL), ws.lease(BYTES, N=SMALL):
        pass
    primed(ws)
    with ws.on(two), ws.lease(BYTES, N=SMALL), ws.lease(BYTES, N=SMALL):
        assert ws.snapshot().fences == 1 and not beside.released
    assert libcuda.calls.count("record") == 1
    assert two.clock.seen[one.id] >= 1


@pytest.mark.parametrize("failing", ["record", "wait"])
def test_a_call_that_fails_is_made_again_by_the_verb(failing: str) -> None:
    """Its error arrives where that fails too, and the block waits where it was."""
    device, ws, libcuda = addressed()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    pool = primed(ws)
    libcuda.codes[failing] = 1
    before = device.counters.copy()
    write(device, ws, "second", SLAB, two)
    made = device.counters - before
    assert (made["record"], made["wait"]) == (1, 1) and device.verdict() == "SAFE"
    verb = getattr(ws.driver, failing)

    def refused(*_: int) -> None:
        raise DriverError("out of order")

    setattr(ws.driver, failing, refused)
    with pytest.raises(DriverError, match="out of order"):
        write(device, ws, "never", SLAB, one)
    assert [len(shelf) for shelf in pool.shelves if shelf] == [1] and ws.snapshot().allocated == 0
    setattr(ws.driver, failing, verb)
    write(device, ws, "third", SLAB, one)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 2


def test_a_stream_that_captures_unseen_is_not_recorded_on() -> None:
    """The answer comes with the calls of the fence; the Python form is asked then, which finds no other way either."""
    device, ws, libcuda = addressed()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    pool = primed(ws)
    libcuda.capturing = 1, 77
    libcuda.calls.clear()
    with pytest.raises(Python):
        write(device, ws, "never", SLAB, two)
    assert "record" not in libcuda.calls and [len(shelf) for shelf in pool.shelves] == [1]
    libcuda.capturing = None
    write(device, ws, "second", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 1


# -- which block -----------------------------------------------------------------------------------------------
def test_an_ordered_block_comes_before_a_fence() -> None:
    """Of the request's own shelves; of another request's, whose shelf the long way empties."""
    device, ws, _ = crowded(2)
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(one):
        early, late = ws.acquire(BYTES, N=SMALL), ws.acquire(BYTES, N=SMALL)
        early.release()
        with ws.fork(two):
            pass
        device.launch("late", writes=[late.x])
        late.release()
    primed(ws)
    write(device, ws, "ordered", SMALL, two)
    assert ws.snapshot().fences == 0 and ws.snapshot().elided == 1 and device.verdict() == "SAFE"
    device, ws, _ = crowded(2)
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(two), ws.lease(OTHER, N=SMALL), ws.on(one), ws.lease(BYTES, N=SMALL):
        pass
    primed(ws)
    with pytest.raises(Python):
        write(device, ws, "beside", SMALL, two)
    assert ws.snapshot().fences == 0


def test_a_free_block_that_fits_is_looked_at_first() -> None:
    """Whoever has used it last: the long way knows."""
    device, ws, _ = crowded(2)
    write(device, ws, "first", SMALL, ws.stream("one"))
    assert primed(ws).largest() >= SMALL
    with pytest.raises(Python):
        write(device, ws, "second", SMALL, ws.stream("two"))
    assert ws.snapshot().fences == 0


@pytest.mark.parametrize("form", BOTH, indirect=True)
@pytest.mark.parametrize("communication", [False, True])
def test_a_stream_whose_uses_are_recorded_at_release_takes_the_long_way(form: None, communication: bool) -> None:
    """A block of its own shelf would come back without an event."""
    device, ws = scene(steady=True, policy="fence", reserve=SLAB)
    asking = ws.stream("collective", communication=True) if communication else ws.stream("two")
    write(device, ws, "first", SLAB, ws.stream("one"))
    primed(ws)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workspace.lease.hand_over", hand_over)
        write(device, ws, "second", SLAB, asking)
    assert ws.snapshot().fences == 1
    assert [len(shelf) for shelf in primed(ws).shelves if shelf] == [1] * (not communication)


@pytest.mark.parametrize("form", BOTH, indirect=True)
def test_a_capture_that_begins_before_the_lock_is_taken_gets_bytes_of_its_own(form: None) -> None:
    """Looked at again under the lock: an eager block would be lent anew while the graph still uses it."""
    device, ws = scene(steady=True, policy="fence", reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    ws.synchronize()  # what the host has seen complete is ordered inside the capture, too
    primed(ws)
    capture = ws.capture()
    begun: list[Any] = []

    def begins(timeline: Timeline) -> bool:
        if not begun:
            begun.append(capture)
            capture.__enter__()
        return bool(timeline.lock._is_owned())

    with ws.on(two), pytest.MonkeyPatch.context() as patch:
        patch.setattr("workspace.lease.hand_over", hand_over)
        patch.setattr(Timeline, "in_progress", begins)
        with ws.lease(BYTES, N=SLAB) as lease:
            device.launch("captured", writes=[lease.x])
        capture.__exit__(None, None, None)
    assert begun and capture.graph.footprint == SLAB
    capture.graph.replay(two)
    capture.graph.release()
    assert device.verdict() == "SAFE" and ws.snapshot().allocated == 0
