"""Leases under autograd, inference mode and fake tensors; copies; empty, huge and zeroed ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workspace.scene import BYTES, host, scene, write
from workspace import Layout, spec
from workspace.errors import (
    GradModeError,
    LayoutError,
    LeaseError,
    WorkspaceError,
)
from workspace.simulated import Device

PAIR = Layout("pair", q=spec("T", 4, dtype=torch.float32), idx=spec("T", dtype=torch.int32))
SAFE = ["caching", "event_fenced", "per_stream"]
BLOCKS = ["event_fenced", "per_stream"]


@pytest.mark.parametrize("strategy", SAFE)
def test_autograd_is_refused_unless_allowed(strategy: str) -> None:
    """A saved tensor over scratch would be overwritten: refused on the steady path too."""
    _, ws = host(strategy)
    with ws.lease(BYTES, N=4):
        pass
    with torch.enable_grad():
        for ask in (lambda: ws.acquire(BYTES, N=4), lambda: ws.empty((4,), torch.float32)):
            with pytest.raises(GradModeError, match="autograd records"):
                ask()
    assert not ws.timeline.state.held
    _, allowing = host(strategy, allow_grad=True)
    with torch.enable_grad(), allowing.lease(BYTES, N=4) as lease:
        assert lease.x.shape == (4,)


@pytest.mark.parametrize("strategy", BLOCKS)
def test_tensors_made_in_inference_mode_are_usable_outside_it(strategy: str) -> None:
    """The cached tensors of a block serve both modes."""
    _, ws = host(strategy)
    with torch.inference_mode(), ws.lease(PAIR, T=2) as lease:
        lease.q.fill_(1)
        assert not lease.q.is_inference()
    with ws.lease(PAIR, T=2) as lease:
        lease.q.add_(1)
        assert lease.q.sum() == 16


@pytest.mark.parametrize("strategy", SAFE)
def test_under_fake_tensors_a_lease_is_fake(strategy: str) -> None:
    """Tracing takes no bytes, and the tensors are fake ones of the right shape."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    _, ws = host(strategy)
    with FakeTensorMode():
        with ws.lease(PAIR, T=3) as lease:
            assert isinstance(lease.q, FakeTensor) and tuple(lease.q.shape) == (3, 4)
        assert lease.released
        assert isinstance(ws.empty((2,), torch.float32), FakeTensor)
        assert isinstance(ws.persistent("counters", (2,), torch.int32), FakeTensor)
    assert ws.snapshot().reserved == 0
    with ws.lease(PAIR, T=3) as lease:
        assert not isinstance(lease.q, FakeTensor)
    assert not isinstance(ws.persistent("counters", (2,), torch.int32), FakeTensor)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lease_is_not_copied(copied: Callable[[Any], object]) -> None:
    """Two leases over the same bytes would be released twice."""
    _, ws = scene()
    with ws.lease(BYTES, N=1) as lease, pytest.raises(LeaseError, match="copy its tensors"):
        copied(lease)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_workspace_is_not_copied(copied: Callable[[Any], object]) -> None:
    """The remedy names what may be sent instead."""
    _, ws = scene()
    with pytest.raises(WorkspaceError, match=r"workspace\.Handle"):
        copied(ws)


@pytest.mark.parametrize("strategy", SAFE)
def test_empty_leases_need_no_bytes(strategy: str) -> None:
    """A zero-size request works locked, in a capture, and on an empty pool, and adds no slab."""
    _, ws = scene(strategy)
    ws.lock()
    with ws.lease(PAIR, T=0) as lease, ws.lease(PAIR, T=0):
        assert tuple(lease.q.shape) == (0, 4)
    with ws.on(ws.stream("main")), ws.capture(), ws.lease(PAIR, T=0) as lease:
        assert tuple(lease.q.shape) == (0, 4)
    assert ws.empty((0, 3), torch.int64).shape == (0, 3)
    assert ws.snapshot().slabs == ()


@pytest.mark.parametrize("dims", [{}, {"N": -1}, {"M": 1}, {"N": 2**63}, {"N": "1"}, {"N": [1]}])
def test_bad_dims_leave_nothing_behind(dims: dict[str, Any]) -> None:
    """The error is a layout's, and the next lease is served."""
    _, ws = scene()
    with pytest.raises(LayoutError):
        ws.acquire(BYTES, **dims)
    assert ws.snapshot().allocated == 0
    write(Device(memory="virtual"), ws, "unjudged", 1, 0)


@pytest.mark.parametrize("nbytes", [2**31, 70_000 * 40_000, 2**40])
def test_leases_beyond_32_bits(nbytes: int) -> None:
    """The last byte is inside the slab."""
    device, ws = scene()
    with ws.lease(BYTES, N=nbytes) as lease:
        last = lease.x.data_ptr() + nbytes - 1
        assert device.memory.segment_of(last) is not None
        device.launch("last byte", writes=[(last, 1)])


def test_zero_fills_on_the_acquiring_stream() -> None:
    """``zero=True`` is a memset there, on every acquire, over the payload only."""
    device, ws = host()
    with ws.lease(BYTES, N=8, zero=True) as lease:
        lease.x.fill_(9)
    with ws.lease(BYTES, N=8, zero=True) as lease:
        assert lease.x.sum() == 0
    assert device.counters["memset"] == 2


@pytest.mark.parametrize("strategy", BLOCKS)
def test_two_leases_of_one_layout_are_apart(strategy: str) -> None:
    """Held at once, they share no byte, also on the steady path."""
    _, ws = scene(strategy, steady=True)
    for _ in range(3):
        with ws.lease(BYTES, N=300) as one, ws.lease(BYTES, N=300) as other:
            assert abs(one.x.data_ptr() - other.x.data_ptr()) >= 300
