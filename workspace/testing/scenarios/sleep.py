"""n: workspaces that give their memory back for a while."""

from __future__ import annotations

import gc

import torch

from workspace.errors import GraphError, SleepError
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.canaries import canaries, intact, survives
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario
from workspace.workspace import Workspace


@scenario("n1", "P", "remap", evidence="bytes")
def graph_that_lives_through_a_sleep(bench: Bench) -> None:
    """A graph, a sleep, canaries of its size meanwhile, the wake: it replays at its addresses and hits nothing else."""
    ws, nbytes = bench.workspace(restorable=True), bench.mib(4)
    bench.reserve(ws, nbytes)
    graph, copy = bench.graph(ws, 41, nbytes)
    graph.replay()
    bench.expect(copy, 41)
    bench.check()
    for _ in range(2):
        ws.sleep()
        tensors = canaries(bench, 8, nbytes)
        with refused(SleepError):
            graph.replay()
        bench.empty_cache()
        ws.wake()
        survives(bench, ws, graph.replay, copy, 41, nbytes)
        intact(bench, tensors)
        bench.check()
    graph.release()


@scenario("n1-moved", "R", "invalidate", evidence="failure")
def graph_whose_bytes_are_given_away(bench: Bench) -> None:
    """Where addresses are not kept the graph is invalid: its replays are refused, and it can be captured anew."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes)
    graph, _ = bench.graph(ws, 41, nbytes)
    graph.replay()
    held = ws.snapshot().reserved
    ws.sleep()
    require(ws.snapshot().reserved == 0, f"{ws.snapshot().reserved} bytes stay reserved for a graph that is invalid")
    tensors = canaries(bench, 8, nbytes)
    ws.wake()
    require(ws.snapshot().reserved == held, f"{ws.snapshot().reserved} bytes after the wake, {held} before the sleep")
    for _ in range(2):
        with refused(GraphError) as refusal:
            graph.replay()
        refusal.names("sleep", "capture it again", "restorable")
    again, copy = bench.graph(ws, 42, nbytes)
    survives(bench, ws, again.replay, copy, 42, nbytes)
    intact(bench, tensors)
    graph.release()
    again.release()


@scenario("n1-read-before", "R", "invalidate", evidence="failure")
def graph_that_reads_what_a_sleep_loses(bench: Bench) -> None:
    """A graph reads a lease of before its capture, whose contents no sleep keeps: invalid, kept addresses or not."""
    ws, nbytes = bench.workspace(restorable=True), bench.mib(4)
    bench.reserve(ws, nbytes, lane=None)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 74)
    with ws.capture() as capture:
        bench.copy(lease.data)
    with refused(SleepError):
        ws.sleep()
    lease.release()
    ws.sleep()
    ws.wake()
    with refused(GraphError) as refusal:
        capture.graph.replay()
    refusal.names("before its capture")


@scenario("n1-unseen", "R", "replayable", evidence="failure")
def graph_replayed_without_the_library(bench: Bench) -> None:
    """A graph that the library cannot refuse to replay stands against the sleep, and goes on as before."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes, lane=None)
    with bench.foreign_capture(bench.main) as captured, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 71)
        copy = bench.copy(lease.data)
    before = ws.snapshot()
    with refused(SleepError) as refusal:
        ws.sleep()
    refusal.names("adopt", "restorable")
    require(ws.snapshot() == before, "a refused sleep changed the state")
    survives(bench, ws, captured.replay, copy, 71, nbytes)
    captured.reset()
    require(bench.soon(lambda: not any(ws.snapshot().footprints.values())), "the footprint outlives its graph")
    ws.sleep()
    require(ws.snapshot().reserved == 0, f"{ws.snapshot().reserved} bytes stay reserved without the graph")
    ws.wake()


@scenario("n1-unseen-restored", "P", "remap", evidence="bytes")
def graph_replayed_without_the_library_after_the_wake(bench: Bench) -> None:
    """The same graph where addresses are kept: it may be replayed unseen before the sleep and after the wake."""
    ws, nbytes = bench.workspace(restorable=True), bench.mib(4)
    bench.reserve(ws, nbytes, lane=None)
    with bench.foreign_capture(bench.main) as captured, ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 72)
        bench.slow()
        copy = bench.copy(lease.data)
    captured.replay()
    ws.sleep()
    bench.expect(copy, 72)
    bench.check()
    tensors = canaries(bench, 4, nbytes)
    bench.empty_cache()
    ws.wake()
    survives(bench, ws, captured.replay, copy, 72, nbytes)
    intact(bench, tensors)
    bench.check()
    captured.reset()


def put_to_use(bench: Bench, ws: Workspace) -> None:
    """Leases on two streams, the first of them read on the second still."""
    (s1,) = bench.streams(1)
    with ws.lease(BLOCK, N=bench.mib(32)) as lease:
        bench.fill(lease.data, 1)
        bench.order(bench.main, s1)
        bench.slow(s1)
        bench.expect(bench.copy(lease.data, s1), 1)
        ws.use(lease, s1)
    with ws.on(s1), ws.lease(OTHER, N=bench.mib(16)) as other:
        bench.fill(other.data, 2)
        bench.expect(bench.copy(other.data), 2)


@scenario("n3", "P", "sleep", evidence="failure")
def nothing_is_reserved_while_asleep(bench: Bench) -> None:
    """Asleep, the library holds no byte of the device and lends none; awake it holds what it held."""
    for restorable in (False, True):
        outside = bench.reserved()
        ws = bench.workspace(restorable=restorable)
        put_to_use(bench, ws)
        held = ws.snapshot().reserved
        require(ws.sleep() == held, "sleep() does not return the bytes it gave back")
        bench.check()
        asleep = ws.snapshot()
        require(asleep.asleep and asleep.reserved == 0, f"{asleep.reserved} bytes stay reserved: {asleep.pinned}")
        require(bench.reserved() <= outside, f"the device has {bench.reserved()} bytes reserved, {outside} before")
        with refused(SleepError) as refusal:
            ws.acquire(BLOCK, N=bench.mib(1))
        refusal.names("block", "wake")
        with refused(SleepError):
            ws.empty((16,), torch.uint8)
        require(ws.sleep() == 0 and ws.wake() == held and ws.wake() == 0, "sleep and wake are not told apart")
        growths = ws.snapshot().growths
        put_to_use(bench, ws)
        after = ws.snapshot()
        require(after.reserved == held and after.growths == growths, f"{after.reserved} bytes instead of {held}")
        bench.check()
        ws.close()


@scenario("n3-viewed", "P", "pinned views", evidence="failure")
def view_that_outlives_the_sleep(bench: Bench) -> None:
    """A view of a released lease keeps its slab: the bytes are counted and listed by owner until it goes."""
    for restorable in (False, True):
        ws, nbytes = bench.workspace(restorable=restorable), bench.mib(8)
        with ws.lease(BLOCK, N=nbytes) as lease:
            cached = lease.data
            bench.fill(cached, 1)
        ws.sleep()
        asleep = ws.snapshot()
        require(asleep.reserved >= nbytes, f"{asleep.reserved} bytes are counted, {nbytes} are viewed")
        require("block" in asleep.pinned, f"the owner of the view is not listed: {asleep.pinned}")
        bench.expect(bench.copy(cached), 1)
        bench.check()
        del cached, lease
        gc.collect(0)
        ws.wake()
        ws.sleep()
        require(ws.snapshot().reserved == 0 and not ws.snapshot().pinned, "still listed after the view went")
        ws.wake()
        with ws.lease(BLOCK, N=nbytes) as again:
            bench.fill(again.data, 2)
            bench.expect(bench.copy(again.data), 2)
        bench.check()
        ws.close()


@scenario("n3-in-use", "R", "on loan", evidence="failure")
def sleep_of_what_is_in_use(bench: Bench) -> None:
    """A lease that is out and a capture that is open stand against the sleep; nothing has changed then."""
    ws, nbytes = bench.ws, bench.mib(4)
    bench.reserve(ws, nbytes, count=2)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 1)
    before = ws.snapshot()
    with refused(SleepError) as refusal:
        ws.sleep()
    refusal.names("block", "release")
    require(ws.snapshot() == before, "a refused sleep changed the state")
    with ws.lease(OTHER, N=nbytes) as other:
        bench.fill(other.data, 2)
        bench.expect(bench.copy(other.data), 2)
    bench.expect(bench.copy(lease.data), 1)
    bench.check()
    lease.release()
    with ws.capture() as capture, refused(SleepError):
        ws.sleep()
    capture.graph.release()
    ws.sleep()
    ws.wake()
