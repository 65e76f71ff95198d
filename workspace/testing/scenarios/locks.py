"""f: locked workspaces and declared sizes."""

from __future__ import annotations

from workspace.errors import CapacityError, LockError
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario


@scenario("f1", "R", "lock", evidence="failure")
def request_above_the_lock(bench: Bench) -> None:
    """Locked at 3 MiB, 12 MiB are asked: the error says who, where, how much and what to set; 2 MiB still come."""
    ws = bench.workspace(granularity=bench.mib(1))
    (s1,) = bench.streams(1)
    with ws.lease(BLOCK, N=bench.mib(3)) as lease:
        bench.fill(lease.data, 1)
    ws.lock()
    before = ws.snapshot()
    for asked in (bench.mib(12), bench.mib(3) + 1):
        with ws.slot(lane="prefill"), ws.on(s1), refused(CapacityError) as refusal:
            ws.acquire(OTHER, N=asked)
        refusal.names(
            "other", "prefill", "micro-batch 0", s1.name, before.reserved, "headroom", refusal.error.fields["site"]
        )
        require(refusal.error.fields["asked"] in range(asked, asked + 256), "the evidence lacks the bytes asked for")
        require(isinstance(refusal.error, MemoryError), "no stable builtin type behind the error")
    require(ws.snapshot() == before, "a refusal changed the state")
    with ws.lease(OTHER, N=bench.mib(2)) as lease:
        bench.fill(lease.data, 2)
        bench.expect(bench.copy(lease.data), 2)


@scenario("f1-limits", "R")
def request_above_a_limit(bench: Bench) -> None:
    """`limit` and `capacity` refuse what exceeds them, and name themselves."""
    with bench.workspace(limit=bench.mib(3)) as ws, ws.lease(BLOCK, N=bench.mib(2)) as lease:
        bench.fill(lease.data, 1)
        with refused(CapacityError) as refusal, ws.lease(OTHER, N=bench.mib(2)) as other:
            bench.fill(other.data, 1)
        refusal.names("limit", "other")
    ws = bench.workspace(capacity=bench.mib(4))
    if not ws.provider.lends_tensors:
        return
    with ws.lease(BLOCK, N=bench.mib(3)) as lease:
        with refused(CapacityError) as refusal:
            ws.acquire(OTHER, N=bench.mib(3))
        refusal.names("capacity")
        bench.fill(lease.data, 2)
        bench.expect(bench.copy(lease.data), 2)
    with ws.lease(OTHER, N=bench.mib(4)) as lease:
        bench.fill(lease.data, 3)


@scenario("f2", "P", no_control="nothing guards: with less reserved the requests are refused, as f1 shows")
def declared_reserved_locked(bench: Bench) -> None:
    """Declared at their largest, reserved and locked; an op never run in warm-up still fits, also in a capture."""
    ws = bench.ws
    s1, s2 = bench.streams(2)
    ws.declare(BLOCK, N=bench.mib(4), phase="attention")
    ws.declare(BLOCK, N=bench.mib(2), phase="attention")
    ws.declare(OTHER, N=bench.mib(6), phase="experts")
    ws.declare(BLOCK, N=bench.mib(1), lane="decode", count=2)
    ws.reserve()
    ws.lock()
    growths = ws.snapshot().growths
    with ws.lease(BLOCK, N=bench.mib(4)) as lease:
        bench.fill(lease.data, 1)
        bench.expect(bench.copy(lease.data), 1)
    for stream in (s1, s2, bench.main):
        with ws.on(stream), ws.lease(OTHER, N=bench.mib(6)) as lease:
            bench.fill(lease.data, 2)
            bench.slow()
            bench.expect(bench.copy(lease.data), 2)
    with ws.capture(lane="decode") as capture:
        with ws.lease(BLOCK, N=bench.mib(1)) as one, ws.lease(OTHER, N=bench.mib(1)) as two:
            bench.fill(one.data, 3)
            bench.fill(two.data, 4)
            copies = bench.copy(one.data), bench.copy(two.data)
    capture.graph.replay()
    bench.expect(copies[0], 3)
    bench.expect(copies[1], 4)
    require(ws.snapshot().growths == growths, "a declared request made the pool grow")


@scenario("f4", "R", "lock", evidence="failure")
def lock_and_unlock(bench: Bench) -> None:
    """Locking twice is no error; unlocking is refused while a graph of this workspace exists, and not after."""
    ws, nbytes = bench.ws, bench.mib(2)
    other = bench.workspace()
    bench.reserve(ws, nbytes)
    graph, copy = bench.graph(ws, 1, nbytes)
    ws.lock()
    ws.lock()
    require(ws.locked, "not locked")
    with refused(LockError) as refusal:
        ws.unlock()
    refusal.names("release")
    require(ws.locked, "a refused unlock unlocked")
    with refused(CapacityError):
        ws.acquire(BLOCK, N=bench.mib(64))
    other.lock()
    other.unlock()
    graph.replay()
    bench.expect(copy, 1)
    bench.check()
    graph.release()
    ws.unlock()
    with ws.lease(BLOCK, N=bench.mib(64)) as lease:
        bench.fill(lease.data, 2)


@scenario("f4-close", "R")
def close_while_in_use(bench: Bench) -> None:
    """Closing is refused while a lease, a single tensor or a graph is out; a closed workspace lends nothing."""
    import torch

    from workspace.errors import WorkspaceError

    ws, nbytes = bench.workspace(), bench.mib(1)
    bench.reserve(ws, nbytes)
    graph, _ = bench.graph(ws, 1, nbytes)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 1)
    tensor = ws.empty((16,), torch.uint8)
    for drop in (lease.release, graph.release):
        with refused(LockError):
            ws.close()
        drop()
    del tensor
    bench.check()
    ws.close()
    ws.close()
    with refused(WorkspaceError):
        ws.acquire(BLOCK, N=nbytes)
