"""Leases without bytes: empty tensors, kept for the next lease, that no provider knows of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workspace.scene import BYTES, scene
from workspace import Layout, spec
from workspace.errors import LeaseReleased, WorkspaceError
from workspace.workspace import Workspace

ROWS = Layout("rows", a=spec("T", 8, dtype=torch.bfloat16), b=spec("T", dtype=torch.int32))
POOLED = ["event_fenced", "per_stream", "unfenced"]


def calls(ws: Workspace) -> int:
    """Of the device, all of its verbs that a lease could need."""
    counters = ws.device.counters
    return sum(counters[verb] for verb in ("alloc", "record", "wait", "query"))


@pytest.mark.parametrize("strategy", POOLED)
def test_an_empty_lease_is_as_short_as_any_other(strategy: str) -> None:
    """From the second on its tensors are the first one's, and the device hears nothing of it."""
    _, ws = scene(strategy, steady=True, allow_unsafe=True)
    with ws.lease(ROWS, T=0) as lease:
        first = lease.a, lease.b
        assert lease.address == 0 and lease.nbytes == 0
    before = calls(ws)
    for _ in range(3):
        with ws.lease(ROWS, T=0) as lease:
            assert lease.a is first[0] and lease.b is first[1]
    assert calls(ws) == before and ws.snapshot().slabs == ()


@pytest.mark.parametrize("strategy", ["caching", *POOLED])
def test_a_layout_without_tensors_is_leased_like_any_other(strategy: str) -> None:
    """It holds nothing: where an op needs no scratch for some settings, the code around it stays as it is."""
    _, ws = scene(strategy, steady=True, allow_unsafe=True)
    nothing, before = Layout("nothing"), calls(ws)
    ws.declare(nothing)
    assert ws.reserve() == 0
    for _ in range(2):
        with ws.lease(nothing) as lease:
            assert lease.nbytes == 0 and lease.tensors == {}
    assert calls(ws) <= before + 1 and ws.snapshot().slabs == ()


@pytest.mark.parametrize("strategy", POOLED)
def test_what_is_asked_for_at_an_empty_lease_is_heard(strategy: str) -> None:
    """A stream, zeros, an adaptor: the lease takes the long way, and nothing is kept for it."""
    _, ws = scene(strategy, steady=True, allow_unsafe=True)
    aux = ws.stream("aux")
    for _ in range(2):
        with ws.lease(ROWS, stream=aux, T=0) as lease:
            assert lease.stream is aux
        with ws.lease(ROWS, zero=True, T=0) as lease:
            assert lease.a.numel() == 0
    assert all(not request.shelves for request in ws._resolved.values())


def test_an_empty_lease_that_is_used_elsewhere_comes_back() -> None:
    """A declared use, a fork, a graph that pins it: the pool never sees a block without bytes."""
    _, ws = scene(steady=True)
    aux, main = ws.stream("aux"), ws.stream("main")
    with ws.on(main):
        lease = ws.acquire(ROWS, T=0)
        lease.release()
        for _ in range(3):
            with ws.lease(ROWS, T=0) as lease, ws.fork(aux):
                ws.use(lease, aux)
            with ws.lease(ROWS, T=0) as lease:
                with ws.capture() as capture:
                    pass
            capture.graph.release()
    pool = ws.strategy_object.pool
    assert not any(pool.free.values()) and pool.taken == 0 and ws.snapshot().allocated == 0


@pytest.mark.parametrize("settings", [{"foreign_captures": "query"}, {"allow_grad": True}])
def test_the_long_way_takes_what_is_kept_too(settings: dict[str, Any]) -> None:
    """Where each acquire goes it, nothing piles up."""
    _, ws = scene(steady=True, **settings)
    with torch.enable_grad() if "allow_grad" in settings else torch.no_grad():
        first = None
        for _ in range(5):
            with ws.lease(ROWS, T=0) as lease:
                first = first if first is not None else lease.a
                assert lease.a is first
    (request,) = ws._resolved.values()
    assert [len(shelf) for shelf in request.shelves.values()] == [1]


def test_an_empty_tensor_stands_for_no_bytes() -> None:
    """A lease at the same address is another's: to declare a use of empty tensors declares nothing."""
    _, ws = scene(steady=True)
    with ws.lease(ROWS, T=0):
        pass
    with ws.lease(ROWS, T=0) as lease:
        assert not lease.covers(0, lease.a)
        ws.use(lease.a, ws.stream("aux"))
        assert lease.address == 0


def test_an_empty_lease_is_released_once() -> None:
    """Its tensors are out of reach then, though they are kept."""
    _, ws = scene(steady=True)
    for _ in range(2):
        lease = ws.lease(ROWS, T=0)
        with lease:
            pass
        for read in (lambda one: one.a, lambda one: one.release()):
            with pytest.raises(LeaseReleased):
                read(lease)


def test_a_closed_workspace_lends_nothing_not_even_no_bytes() -> None:
    """What was kept goes with it."""
    _, ws = scene(steady=True)
    with ws.lease(ROWS, T=0):
        pass
    late = ws.lease(ROWS, T=0)
    ws.close()
    with pytest.raises(WorkspaceError, match="closed"):
        late.__enter__()


def test_an_empty_lease_beside_another_of_its_layout() -> None:
    """Two at once are two; the layout at other dims has bytes."""
    _, ws = scene(steady=True)
    with ws.lease(ROWS, T=0) as one, ws.lease(ROWS, T=0) as other, ws.lease(ROWS, T=2) as full:
        assert one is not other and full.nbytes and not one.nbytes
    with ws.lease(BYTES, N=0) as empty:
        assert empty.x.numel() == 0
