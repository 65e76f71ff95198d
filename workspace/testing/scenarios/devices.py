"""j: two devices."""

from __future__ import annotations

import torch

from workspace.errors import DeviceError, ForkError, LateUse, StreamError
from workspace.testing.bench import BLOCK, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario


@scenario("j1", "P", no_control="each device has a driver of its own: there is no guard to remove")
def acquire_on_another_device(bench: Bench) -> None:
    """Leases of a second device: its memory, its events, its fills; nothing moves on the first."""
    ws, second = bench.ws, bench.another()
    other = second.ws
    with torch.no_grad(), ws.lease(BLOCK, N=bench.mib(1)) as mine:
        bench.fill(mine.data, 1)
        before, stream = bench.calls(), ws.driver.current_stream()
        with other.on(second.main), other.lease(BLOCK, N=bench.mib(4), zero=True) as lease:
            address = second.address(lease.data)
            # While it is lent: afterwards an allocator may give it back to the device. Virtual addresses are
            # counted from one base on every device.
            elsewhere = second.owns(address) and not (bench.real and bench.owns(address))
            (side,) = second.streams(1)
            with other.fork(side) as branch, branch(side):
                second.slow()
                second.expect(second.copy(lease.data), 0)
        with other.on(second.main), other.lease(BLOCK, N=bench.mib(4)) as again:
            second.fill(again.data, 2)
        require(bench.calls() == before, "the first device was called")
        require(ws.driver.current_stream() == stream, "the first device's current stream moved")
        require(elsewhere, "the bytes are on another device")
        second.check()
        second.no_race()


@scenario("j3", "R")
def stream_of_another_device(bench: Bench) -> None:
    """Streams, tensors and leases of another device are refused, and change nothing."""
    ws, second = bench.ws, bench.another()
    foreign = second.ws.stream("side1")
    fork = ws.fork(bench.streams(1)[0])
    lease = ws.acquire(BLOCK, N=16)
    before = ws.snapshot()
    for call in (
        lambda: ws.acquire(BLOCK, N=16, stream=foreign), lambda: ws.use(lease, foreign), lambda: ws.on(foreign),
        lambda: ws.fork(foreign).__enter__(), lambda: ws.event().record(foreign), lambda: ws.synchronize(foreign),
        lambda: fork(foreign), lambda: ws.acquire(BLOCK, N=16, stream="side1"),
    ):  # fmt: skip
        with refused(StreamError, ForkError):
            call()
    if bench.real:
        # Virtual addresses are counted from one base on every device: there a tensor does not tell its device.
        with refused(LateUse, DeviceError):
            ws.use(second.allocate(16), bench.main)
    require(ws.snapshot() == before, "a refusal changed the state")
    lease.release()


@scenario("j3-unknown", "R")
def devices_that_do_not_exist(bench: Bench) -> None:
    """Unknown devices and strategies are named errors."""
    from workspace.create import create
    from workspace.errors import ConfigError, UnknownStrategy, UnsafeStrategy

    for device in ("tpu", "mps", object(), torch.empty(16)):
        with refused(DeviceError):
            create(bench.strategy, device=device)
    with refused(UnknownStrategy) as refusal:
        create("event_fence", device="cpu")
    refusal.names("event_fenced")
    with refused(UnsafeStrategy) as refusal:
        create("unfenced", device="cpu")
    refusal.names("allow_unsafe")
    with refused(ConfigError):
        create(bench.strategy, device="cpu", micro_batch=2)
