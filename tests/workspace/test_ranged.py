"""Leases with the setting `nvtx`: a range each, ended with the lease however that ends; without it, none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, MIB, OTHER
from workspace import Workspace
from workspace.errors import CapacityError, CaptureError, ConfigError, LeaseError
from workspace.lease import PLAIN
from workspace.ranged import Ranged
from workspace.simulated import Device

STRATEGIES = ("caching", "event_fenced", "per_stream", "upstream", "unfenced")


class Recorder:
    """Stands in for `torch.cuda.nvtx`. A range that is ended twice, or was never begun, is a `KeyError`."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self._open: dict[int, str] = {}

    def range_start(self, msg: str, /) -> int:
        self.begun.append(msg)
        handle = len(self.begun)
        self._open[handle] = msg
        return handle

    def range_end(self, range_id: int, /) -> None:
        self.ended.append(self._open.pop(range_id))

    @property
    def open(self) -> list[str]:
        """Names of the ranges under way, oldest first."""
        return list(self._open.values())


def seen(strategy: str = "event_fenced", *, nvtx: bool = True, **settings: Any) -> tuple[Recorder, Workspace]:
    device, recorder = Device(memory="host"), Recorder()
    device.driver().ranges = recorder
    device.driver().attributes = False  # else no lease takes a short way
    return recorder, workspace.create(strategy, device=device, nvtx=nvtx, allow_unsafe=True, **settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_lease_is_a_range(strategy: str) -> None:
    """From its acquire to its release, nested as leases are, also where they take the short ways."""
    ranges, ws = seen(strategy)
    for _ in range(3):
        with ws.lease(BYTES, N=512) as outer:
            assert ranges.open == ["workspace:bytes"]
            with ws.lease(OTHER, N=256) as inner:
                assert ranges.open == ["workspace:bytes", "workspace:other"]
                short = outer._state == inner._state == PLAIN
                outer.x[:], inner.y[:] = 1, 2
            assert ranges.open == ["workspace:bytes"]
        assert ranges.open == []
    assert short
    assert ranges.begun == ["workspace:bytes", "workspace:other"] * 3
    assert ranges.ended == ["workspace:other", "workspace:bytes"] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_the_setting_there_is_none(strategy: str) -> None:
    """What the same program does under it is the control."""
    for nvtx, expected in ((False, 0), (True, 4)):
        ranges, ws = seen(strategy, nvtx=nvtx)
        for _ in range(2):
            with ws.lease(BYTES, N=512) as lease, ws.lease(OTHER, N=0):
                assert isinstance(lease, Ranged) is nvtx
        assert len(ranges.begun) == len(ranges.ended) == expected


def test_an_owner_is_named() -> None:
    ranges, ws = seen()
    with ws.owner("draft").lease(BYTES, N=512):
        assert ranges.open == ["workspace:draft/bytes"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_body_that_raises_ends_its_range(strategy: str) -> None:
    ranges, ws = seen(strategy)
    with pytest.raises(ZeroDivisionError), ws.lease(BYTES, N=512), ws.lease(OTHER, N=512):
        raise ZeroDivisionError
    assert ranges.open == [] and len(ranges.ended) == 2


def test_a_refused_acquire_ends_its_range() -> None:
    ranges, ws = seen(limit=MIB)
    with pytest.raises(CapacityError):
        ws.acquire(BYTES, N=2 * MIB)
    assert ranges.begun == ranges.ended == ["workspace:bytes"]


def test_a_second_acquire_leaves_the_range_of_the_first() -> None:
    ranges, ws = seen()
    with ws.lease(BYTES, N=512) as lease:
        with pytest.raises(LeaseError, match="acquired twice"):
            lease.__enter__()
        assert ranges.open == ["workspace:bytes"]
    lease.__exit__(None, None, None)  # of what is released: nothing
    assert ranges.begun == ranges.ended == ["workspace:bytes"]


def test_leases_that_overlap_end_their_own_ranges() -> None:
    """As no stack of ranges could: the first to begin ends first."""
    ranges, ws = seen()
    first, second = ws.acquire(BYTES, N=512), ws.acquire(OTHER, N=512)
    first.release()
    assert ranges.open == ["workspace:other"]
    second.release()
    assert ranges.ended == ["workspace:bytes", "workspace:other"]


def test_a_release_on_another_thread_ends_the_range() -> None:
    ranges, ws = seen()
    lease = ws.acquire(BYTES, N=512)
    thread = threading.Thread(target=lease.release)
    thread.start()
    thread.join()
    assert ranges.open == [] and ranges.ended == ["workspace:bytes"]


def test_branches_of_a_fork_are_ranges() -> None:
    """Also those of two micro-batches, which hold their leases in turn."""
    ranges, ws = seen(micro_batches=2)
    aux = ws.stream("aux")
    held = []
    for part in range(2):
        with ws.slot(micro_batch=part):
            held.append(ws.acquire(BYTES, N=512))
    for part in range(2):
        with ws.slot(micro_batch=part):
            with ws.fork(aux) as branch, branch(aux), ws.lease(OTHER, N=512):
                assert ranges.open[-1] == "workspace:other"
            held[part].release()
    assert ranges.open == []
    assert ranges.ended == ["workspace:other", "workspace:bytes"] * 2


class Work:
    """A collective that fails once."""

    def __init__(self) -> None:
        self.failed = False

    def wait(self) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the collective failed")


def test_a_lease_that_stays_held_keeps_its_range() -> None:
    ranges, ws = seen()
    lease = ws.acquire(BYTES, N=512)
    lease.until(Work())
    with pytest.raises(RuntimeError, match="the collective failed"):
        lease.release()
    assert ranges.open == ["workspace:bytes"]
    lease.release()
    assert ranges.open == []


@pytest.mark.parametrize("strategy", ["caching", "event_fenced", "unfenced"])
def test_a_capture_has_ranges_and_a_replay_none(strategy: str) -> None:
    """A lease that is held when its capture fails ends there, and so does its range."""
    ranges, ws = seen(strategy)
    for layout in (BYTES, OTHER):
        ws.declare(layout, N=512, lane="main")
    ws.reserve()
    with ws.on(ws.stream("main")):
        with ws.capture() as capture:
            with ws.lease(BYTES, N=512) as lease:
                lease.x[:] = 1
        capture.graph.replay()
        assert ranges.begun == ranges.ended == ["workspace:bytes"]
        with pytest.raises(CaptureError, match="ends while it holds other"), ws.capture():
            kept = ws.acquire(OTHER, N=512)
        assert kept.released
    assert ranges.begun == ranges.ended == ["workspace:bytes", "workspace:other"]


def test_a_device_without_a_profiler_refuses_the_setting() -> None:
    with pytest.raises(ConfigError, match="nvtx=true on simulated, which no profiler sees"):
        workspace.create(nvtx=True)
    assert workspace.create(nvtx=False).driver.ranges is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_a_gpu_ranges_are_those_of_torch(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each handle that NVTX gave is ended once, eager, in a capture, and not at all at a replay."""
    begun: list[int] = []
    ended: list[int] = []
    start, end = torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end

    def range_start(name: str) -> int:
        begun.append(start(name))
        return begun[-1]

    def range_end(handle: int) -> None:
        end(handle)
        ended.append(handle)

    monkeypatch.setattr(torch.cuda.nvtx, "range_start", range_start)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", range_end)
    ws = workspace.create(strategy, device="cuda", nvtx=True, allow_unsafe=True)
    ws.declare(BYTES, N=512, count=2)
    ws.declare(BYTES, N=512, lane="main")
    ws.reserve()
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main):
        for _ in range(3):
            with ws.lease(BYTES, N=512) as lease, ws.fork(aux) as branch, branch(aux):
                lease.x.fill_(1)
        with ws.capture() as capture, ws.lease(BYTES, N=512) as lease:
            lease.x.fill_(2)
        assert len(begun) == 4
        capture.graph.replay()
        ws.synchronize()
    assert begun == ended and len(begun) == 4
    capture.graph.release()
    ws.close()
