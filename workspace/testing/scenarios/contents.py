"""k: what bytes hold before anybody writes them."""

from __future__ import annotations

import torch

from workspace.errors import GuardError, LayoutError
from workspace.layout import Layout, spec
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario

FLOATS = Layout("floats", data=spec("N", dtype=torch.float32))


@scenario("k1", "P", "poison", evidence="bytes", virtual=False)
def poisoned_contents(bench: Bench) -> None:
    """In debug mode what nobody wrote is a pattern: 0xCB, and NaN in floating types."""
    ws = bench.workspace(poison=True)
    for _ in range(2):
        with ws.lease(BLOCK, N=bench.mib(1)) as lease, ws.lease(FLOATS, N=bench.mib(0.25)) as floats:
            bench.expect(bench.copy(lease.data), 0xCB)
            bench.expect(bench.copy(floats.data), 0xFF)
            bench.check()
            bench.fill(lease.data, 1)
            bench.fill(floats.data, 2)


@scenario("k1-zero", "P", "zero", evidence="bytes")
def zeroed_contents(bench: Bench) -> None:
    """`zero=True` fills on the acquiring stream, again at each replay, whatever the bytes held before."""
    ws, nbytes = bench.ws, bench.mib(1)
    (s1,) = bench.streams(1)
    bench.reserve(ws, nbytes)
    with ws.lease(BLOCK, N=nbytes) as dirty:
        bench.fill(dirty.data, 9)
    for stream in (bench.main, s1):
        with ws.on(stream), ws.lease(BLOCK, N=nbytes, zero=True) as lease:
            bench.expect(bench.copy(lease.data), 0)
            bench.fill(lease.data, 9)
    with ws.capture() as capture, ws.lease(BLOCK, N=nbytes, zero=True) as lease:
        copy = bench.copy(lease.data)
        bench.fill(lease.data, 9)
    for turn in range(5):
        capture.graph.replay()
        bench.expect(copy, 0)
        with ws.lease(OTHER, N=nbytes) as dirty:
            bench.fill(dirty.data, turn + 1)
        bench.check()


@scenario("k1-persistent", "P", no_control="the buffer is the framework allocator's own and never lent again")
def persistent_counters(bench: Bench) -> None:
    """A buffer of a name is zero once, keeps its address and contents, and is read by any stream."""
    ws, (s1,) = bench.ws, bench.streams(1)
    counters = ws.persistent("counters", (64,), torch.int32)
    bench.expect(bench.copy(counters, s1), 0)
    bench.check()
    bench.order(s1, bench.main)
    bench.fill(counters, 5)
    with ws.lease(BLOCK, N=bench.mib(4)) as lease:
        bench.fill(lease.data, 1)
    again = ws.persistent("counters", (64,), torch.int32)
    require(bench.address(again) == bench.address(counters), "the buffer moved")
    bench.expect(bench.copy(again), 5)
    with ws.capture() as capture:
        copy = bench.copy(ws.persistent("counters", (64,), torch.int32))
    capture.graph.replay()
    bench.expect(copy, 5)
    with refused(LayoutError):
        ws.persistent("counters", (64,), torch.int64)


@scenario("k1-guard", "D", "guard", evidence="failure", virtual=False)
def write_outside_a_lease(bench: Bench) -> None:
    """With guard bands a write before or behind a lease is found at its release, with owner, side and offset."""
    ws = bench.workspace(guard=512)
    with ws.lease(BLOCK, N=1024) as lease:
        bench.fill(lease.data, 1)
        bench.expect(bench.copy(lease.data), 1)
        bench.check()
    for offset, where in ((1024, "after"), (-1, "before")):
        lease = ws.acquire(BLOCK, N=1024)
        bench.fill_at(bench.address(lease.data) + offset, 1, 0)
        with refused(GuardError) as refusal:
            lease.release()
        refusal.names(where, "block")
        require(ws.snapshot().allocated == 0, "the refused release kept the bytes")


@scenario("k1-adaptors", "P", "fence", virtual=False)
def every_adaptor_at_once(bench: Bench) -> None:
    """Guard bands, poison, statistics and a limit together change no data and no order."""
    ws, nbytes = bench.workspace(guard=256, poison=True, statistics=True, limit=bench.mib(8)), bench.mib(1)
    s1, s2 = bench.streams(2)
    for step in range(3):
        with ws.on((s1, s2)[step % 2]), ws.lease(BLOCK, N=nbytes) as lease:
            bench.fill(lease.data, step + 1)
            bench.slow()
            bench.expect(bench.copy(lease.data), step + 1)
    ws.synchronize()
    snapshot = ws.snapshot()
    require(snapshot.owners["block"].acquires == 3, f"{snapshot.owners} does not count three leases")
    require(snapshot.allocated == 0 and snapshot.peak_allocated >= nbytes, f"peaks are wrong: {snapshot}")
