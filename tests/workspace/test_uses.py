"""Declared uses: by lease, tensor or fork, of collectives, of every stream seen, and too late."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workspace.scene import BYTES, MIB, SLAB, host, scene, write
from workspace import Layout, Workspace, spec
from workspace.errors import (
    CaptureError,
    LateUse,
)
from workspace.simulated import Device

PAIR = Layout("pair", q=spec("T", 4, dtype=torch.float32), idx=spec("T", dtype=torch.int32))
SAFE = ["caching", "event_fenced", "per_stream"]
BLOCKS = ["event_fenced", "per_stream"]


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("declared", [True, False])
def test_a_declared_use_is_ordered(strategy: str, declared: bool) -> None:
    """The next owner waits for the reader; without the declaration it does not, and the judge says so."""
    device, ws = scene(strategy)
    aux = ws.stream("aux")
    lease = ws.acquire(BYTES, N=SLAB)
    tensor = lease.x.tensor() if strategy == "caching" else lease.x
    device.launch("fill", writes=[tensor])
    ready = ws.event()
    ready.record()
    ready.wait(aux)
    device.launch("read", reads=[tensor], stream=aux.key)
    if declared:
        lease.use(aux)
    lease.release()
    del tensor
    gc.collect()
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("overwrite", writes=[lease.x])
    assert device.verdict() == ("SAFE" if declared else "UNSAFE")


def test_a_use_by_hand_outlasts_a_fork() -> None:
    """A join ends the branch's use, not the one the user declared for the same stream."""
    for acquirer in ("main", "other"):
        device, ws = scene()
        aux, other = ws.stream("aux"), ws.stream("other")
        lease = ws.acquire(BYTES, stream=other if acquirer == "other" else 0, N=SLAB)
        ws.use(lease, aux)
        with ws.fork(aux):
            pass
        device.launch("late read", reads=[lease.x], stream=aux.key)
        lease.release()
        with ws.on(lease.stream), ws.lease(BYTES, N=SLAB) as lease:
            device.launch("write", writes=[lease.x])
        assert device.verdict() == "SAFE", acquirer


def test_a_late_use_is_refused() -> None:
    """After the release others may own the bytes: by lease and by tensor."""
    _, ws = scene()
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=100) as lease:
        tensor = lease.x
    with pytest.raises(LateUse, match="after its release"):
        lease.use(aux)
    with pytest.raises(LateUse, match="no live lease"):
        ws.use(tensor, aux)
    with pytest.raises(LateUse, match="before the release"):
        ws.until(ws.event())


@pytest.mark.parametrize("strategy", SAFE)
def test_a_use_is_declared_by_lease_tensor_or_view(strategy: str) -> None:
    """Whatever lies in the lease's bytes names the lease."""
    _, ws = host(strategy)
    aux = ws.stream("aux")
    with ws.lease(PAIR, T=4) as lease:
        whole = lease.q.tensor() if strategy == "caching" else lease.q
        for one in (lease, lease.q, whole[1:], whole.view(16)):
            ws.use(one, aux)


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("place", [scene, host])
def test_an_empty_tensor_may_be_declared_used(place: Callable[..., tuple[Device, Workspace]], strategy: str) -> None:
    """It has no bytes that anybody could overwrite, and model code does not test for it."""
    _, ws = place(strategy)
    with ws.lease(PAIR, T=0) as lease:
        ws.use(lease.q, ws.stream("aux"))


def test_declared_uses_across_a_capture_are_refused() -> None:
    """An eager lease is not used in a capture it was not held for, nor a captured one outside."""
    _, ws = scene(reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main):
        with ws.capture():
            with ws.lease(BYTES, N=100) as inside, pytest.raises(CaptureError, match="is used on"):
                inside.use(aux)
            with ws.on(aux):
                outside = ws.acquire(BYTES, N=100)
            with pytest.raises(CaptureError, match="lease it before the capture begins, or inside it"):
                outside.use(main)
    outside.release()


class Work:
    """A collective's handle: what follows ``wait`` on a stream comes after it."""

    def __init__(self, device: Device, ws: Workspace, tensor: Any) -> None:
        self._device = device
        self._done = ws.event()
        with ws.on(ws.stream("nccl", communication=True)):
            device.launch("reduce", writes=[tensor])
            self._done.record()

    def wait(self) -> None:
        self._done.wait()


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("waited", [True, False])
def test_a_lease_outlives_its_collective(strategy: str, waited: bool) -> None:
    """``ws.until(work)`` releases only after ``work.wait()`` on the acquiring stream (pytorch#148590)."""
    device, ws = scene(strategy)
    nccl = ws.stream("nccl", communication=True)
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("fill", writes=[lease.x])
        ready = ws.event()
        ready.record()
        ready.wait(nccl)
        work = Work(device, ws, lease.x)
        if waited:
            ws.until(work)
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("next", writes=[lease.x])
    assert device.verdict() == ("SAFE" if waited else "UNSAFE")


@pytest.mark.parametrize("strict", [True, False])
def test_strict_streams_count_every_stream_seen(strict: bool) -> None:
    """The setting orders the next owner after streams nobody declared."""
    device, ws = scene(strict_streams=strict)
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("undeclared", writes=[lease.x], stream=aux.key)
    write(device, ws, "next", SLAB, 0)
    assert device.verdict() == ("SAFE" if strict else "UNSAFE")


def test_strict_streams_count_for_single_tensors() -> None:
    """They are scratch as any other."""
    device, ws = scene(strict_streams=True)
    tensor = ws.empty((SLAB,), torch.uint8)
    device.launch("undeclared", writes=[tensor], stream=ws.stream("aux").key)
    del tensor
    gc.collect()
    write(device, ws, "next", SLAB, 0)
    assert device.verdict() == "SAFE"


def test_strict_streams_count_inside_a_capture() -> None:
    """Every stream of the capture is a user of its leases."""
    device, ws = scene(strict_streams=True, reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture, ws.fork(aux) as branch:
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("write", writes=[lease.x])
            ready = ws.event()
            ready.record()
            ready.wait(aux)
            with branch(aux):
                device.launch("undeclared", reads=[lease.x])
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("next", writes=[lease.x])
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"
