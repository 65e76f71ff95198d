"""Forked children, sticky device errors, and the calls in the middle of which things fail."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, MIB, SLAB, host, scene, write
from workspace import Workspace
from workspace.errors import DriverError, ProcessError, WorkspaceError
from workspace.timeline import Timeline

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def in_child(check: Callable[[], object]) -> None:
    """Run a check in a forked child, and fail with what it failed with."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork while other threads of the test run exist
        child = os.fork()
    if not child:
        try:
            check()
            os.write(writer, b"ok")
        except BaseException as error:
            os.write(writer, repr(error).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as result:
        answer = result.read().decode()
    os.waitpid(child, 0)
    assert answer == "ok"


REFUSED: dict[str, Callable[[Workspace], object]] = {
    "lease": lambda ws: ws.lease(BYTES, N=4096).__enter__(),
    "repeated lease": lambda ws: ws.acquire(BYTES, N=64),
    "empty": lambda ws: ws.empty((4,), torch.uint8),
    "persistent": lambda ws: ws.persistent("p", (4,), torch.uint8),
    "reserve": lambda ws: ws.reserve(),
    "capture": lambda ws: ws.capture().__enter__(),
    "fork": lambda ws: ws.fork(ws.stream("aux")).__enter__(),
}


@pytest.mark.parametrize("call", REFUSED)
def test_a_forked_child_is_refused_by_the_parents_pid(call: str) -> None:
    """The device context is the parent's; the parent goes on as if nothing had happened."""
    device, ws = scene(steady=True, reserve=MIB)
    ws.stream("aux")
    with ws.lease(BYTES, N=64):
        pass
    parent = os.getpid()

    def check() -> None:
        with pytest.raises(ProcessError, match=str(parent)) as caught:
            REFUSED[call](ws)
        assert caught.value.fields["parent"] == parent and "spawn" in caught.value.remedy

    in_child(check)
    write(device, ws, "parent", 64, 0)
    assert device.verdict() == "SAFE"


def test_a_graph_is_not_replayed_in_a_forked_child() -> None:
    """Nor released by its end: the device's objects are the parent's."""
    device, ws = scene(reserve=MIB)
    main = ws.stream("main")
    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=64) as scratch:
        device.launch("captured", writes=[scratch.x])

    def check() -> None:
        with pytest.raises(ProcessError):
            capture.graph.replay(main)

    in_child(check)
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"


def test_a_child_forked_under_the_lock_is_refused_and_does_not_hang() -> None:
    """Another thread may have held it at the fork."""
    _, ws = scene()

    def check() -> None:
        with pytest.raises(ProcessError):
            ws.acquire(BYTES, N=64)

    with ws.timeline.lock:
        in_child(check)


def test_a_child_makes_a_workspace_of_its_own() -> None:
    """As the error advises, on the CPU and through a handle."""
    handle = workspace.Handle(workspace.WorkspaceConfig(strategy="event_fenced"))
    with handle().lease(BYTES, N=64):
        pass

    def check() -> None:
        for ws in (workspace.create("event_fenced", device="cpu"), handle()):
            with torch.no_grad(), ws.lease(BYTES, N=64) as lease:
                lease.x.fill_(3)
                assert lease.x.sum() == 192

    in_child(check)


def test_nothing_of_a_forked_child_reaches_the_parents_device() -> None:
    """Events, streams, synchronisations and uses, too; what only the host keeps can be looked at, and leases end."""
    device, ws = scene("event_fenced", reserve=MIB)
    main, raw = ws.stream("main"), device.new_raw_stream("raw")
    with ws.on(main):
        with ws.capture() as capture, ws.lease(BYTES, N=64) as scratch:
            device.launch("captured", writes=[scratch.x])
        event, staging, lease = ws.event(), ws.staging("s", 64), ws.acquire(BYTES, N=64)
        event.record()
    before = device.counters.copy()

    def upload() -> None:
        with staging.fill() as slot:
            slot.upload(lease.x)

    def check() -> None:
        for call in (
            *(event.record, lambda: event.wait(main), event.query, event.synchronize, ws.event, upload, ws.trim),
            *(ws.synchronize, lambda: ws.synchronize(main), lambda: lease.use(raw), lambda: ws.stream("new")),
            *(lambda: ws.on(raw), capture.graph.release, ws.sleep, ws.wake, lambda: ws.staging("other", 8)),
        ):
            with pytest.raises(ProcessError):
                call()
        assert ws.stream("main") is main and ws.snapshot().allocated and lease.address and not ws.usable
        lease.release()
        assert device.counters == before

    in_child(check)
    lease.release()
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"


MADE: dict[str, Callable[[Workspace], object]] = {
    "event": lambda ws: ws.event(),
    "fork": lambda ws: ws.fork(ws.stream("aux")),
    "branch": lambda ws: ws.on(ws.stream("aux")),
    "capture": lambda ws: ws.capture(),
    "graph": lambda ws: ws.capture().graph,
    "staging": lambda ws: ws.staging("s", 8),
}


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("made", MADE)
def test_what_is_of_a_process_is_not_copied(made: str, copied: Callable[[object], object]) -> None:
    """As workspaces and leases: a typed error that says what to keep instead."""
    _, ws = scene()
    with pytest.raises(ProcessError, match="cannot be pickled or copied") as caught:
        copied(MADE[made](ws))
    assert "Handle" in caught.value.remedy


def test_a_copied_module_works_on_the_same_stream() -> None:
    """A stream is a name, and the same one in a copy; to another process it does not go."""
    _, ws = scene()
    aux = ws.stream("aux")
    twin = copy.deepcopy({"side": aux})["side"]
    assert twin is aux and copy.copy(aux) is aux
    with ws.fork(twin) as branch, branch(twin):
        pass
    with pytest.raises(ProcessError, match="a Stream cannot"):
        pickle.dumps(aux)


def test_a_lease_held_over_a_fork_is_released_in_the_parent() -> None:
    """The child's copy ends quietly."""
    _, ws = scene(steady=True)
    for _ in range(2):
        with ws.lease(BYTES, N=64) as lease:
            in_child(lambda lease=lease: lease.release())  # type: ignore[misc]
    assert ws.snapshot().allocated == 0


# -- sticky errors -----------------------------------------------------------------------------------------------


def sticky(monkeypatch: pytest.MonkeyPatch, ws: Workspace, verb: str, *, is_sticky: bool = True) -> DriverError:
    error = DriverError("illegal memory access", "restart", sticky=is_sticky)

    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(ws.driver, verb, fail)
    return error


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
@pytest.mark.parametrize("verb", ["record", "wait", "synchronize"])
def test_a_sticky_error_refuses_everything_with_itself(
    monkeypatch: pytest.MonkeyPatch, strategy: str, verb: str
) -> None:
    """Later requests do not look at the device again, the repeated ones included."""
    device, ws = scene(strategy, steady=True)
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "one", SLAB, one)
    error = sticky(monkeypatch, ws, verb)
    with pytest.raises(DriverError):
        if verb == "synchronize":
            ws.synchronize()
        else:
            ws.acquire(BYTES, stream=two, N=SLAB)
    monkeypatch.undo()
    for call in REFUSED.values():
        with pytest.raises(DriverError, match="illegal memory access") as caught:
            call(ws)
        assert caught.value is error
    with ws.on(one), pytest.raises(DriverError, match="illegal memory access"), ws.lease(BYTES, N=SLAB):
        pass


@pytest.mark.parametrize("verb", ["record", "wait", "alloc", "tensor"])
def test_a_passing_error_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The call fails, nothing is on loan, and the next one is served."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "one", SLAB, one)
    sticky(monkeypatch, ws, verb, is_sticky=False)
    with pytest.raises(WorkspaceError, match="illegal"), ws.on(two):
        ws.acquire(BYTES, N=2 * SLAB if verb in ("alloc", "tensor") else SLAB)
    monkeypatch.undo()
    assert ws.snapshot().allocated == 0 and not ws.timeline.state.held and ws.timeline.refusal is None
    write(device, ws, "two", SLAB, two)
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize("verb", ["record", "wait"])
def test_a_call_that_fails_teaches_the_clocks_nothing(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The edge was not made, so the next acquire makes it."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "one", SLAB, one)
    event = ws.event()
    sticky(monkeypatch, ws, verb, is_sticky=False)
    with pytest.raises(DriverError):
        event.record(one)
        event.wait(two)
    monkeypatch.undo()
    write(device, ws, "two", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 1


# -- the order of calls ------------------------------------------------------------------------------------------


class MergesBeforeWait(Timeline):
    __slots__ = ()

    def wait(self, event: Any, stream: Any) -> None:
        self.clocks.wait(stream.id, event.covered)
        super().wait(event, stream)


class TicksAfterRecord(Timeline):
    __slots__ = ()

    def record(self, stream: Any, event: Any = None) -> Any:
        event = event or self.new_event()
        self.driver.record(event.handle, stream.key)
        event.epoch = stream.clock.epoch
        event.covered = self.clocks.record(stream.id)
        stream.last = event
        return event


@pytest.mark.parametrize(("timeline", "verdict"), [(Timeline, "SAFE"), (TicksAfterRecord, "UNSAFE")])
def test_a_use_during_a_record_is_not_claimed(
    monkeypatch: pytest.MonkeyPatch, timeline: type[Timeline], verdict: str
) -> None:
    """A thread without the lock enqueues and releases between the device's record and its return."""
    device, ws = scene(steady=True)
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "warm", SLAB, one)
    record = ws.driver.record

    def interrupted(event: int, stream: int) -> None:
        record(event, stream)
        monkeypatch.setattr(ws.driver, "record", record)
        write(device, ws, "meanwhile", SLAB, one)

    monkeypatch.setattr(ws.timeline, "__class__", timeline)
    event = ws.event()
    monkeypatch.setattr(ws.driver, "record", interrupted)
    event.record(one)
    event.wait(two)
    write(device, ws, "two", SLAB, two)
    assert device.verdict() == verdict


@pytest.mark.parametrize(("timeline", "verdict"), [(Timeline, "SAFE"), (MergesBeforeWait, "UNSAFE")])
def test_a_wait_that_fails_orders_nothing(
    monkeypatch: pytest.MonkeyPatch, timeline: type[Timeline], verdict: str
) -> None:
    """The clocks learn of an edge after the device has made it."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "one", SLAB, one)
    monkeypatch.setattr(ws.timeline, "__class__", timeline)
    event = ws.event()
    event.record(one)
    wait = ws.driver.wait
    sticky(monkeypatch, ws, "wait", is_sticky=False)
    with pytest.raises(DriverError):
        event.wait(two)
    monkeypatch.setattr(ws.driver, "wait", wait)
    write(device, ws, "two", SLAB, two)
    assert device.verdict() == verdict


def test_the_default_workspace_on_the_cpu_computes() -> None:
    """The serial device: no log, no schedule, right results."""
    _, ws = host("caching")
    with ws.lease(BYTES, N=16) as lease:
        lease.x.fill_(2)
        assert torch.add(lease.x, 1).sum() == 48
