"""h: host threads."""

from __future__ import annotations

import gc
import random
import threading

import torch

from workspace.lease import Lease
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import require
from workspace.testing.scenario import scenario


class _Live:
    """Ranges out on lease, kept beside the library under a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, int] = {}

    def add(self, address: int, nbytes: int) -> None:
        with self._lock:
            for start, size in self._ranges.items():
                require(
                    address + nbytes <= start or start + size <= address,
                    f"[{address:#x}, +{nbytes}) is lent while [{start:#x}, +{size}) is out",
                )
            self._ranges[address] = nbytes

    def remove(self, address: int) -> None:
        with self._lock:
            del self._ranges[address]


@scenario("h1", "P", "exclusive", evidence="failure", real=False)
def many_threads_and_streams(bench: Bench) -> None:
    """Eight threads of two streams each, thousands of random leases: live ranges are disjoint, no byte is lost."""
    ws, live = bench.ws, _Live()
    count = 5000

    def worker(number: int) -> None:
        choose = random.Random(number)
        streams = [ws.stream(f"thread{number}.{which}") for which in range(2)]
        held: list[Lease] = []
        for step in range(count):
            if held and (len(held) > 3 or choose.random() < 0.5):
                lease = held.pop(choose.randrange(len(held)))
                live.remove(bench.address(lease.data))
                lease.release()
            else:
                with ws.on(streams[choose.randrange(2)]):
                    lease = ws.acquire((BLOCK, OTHER)[step % 2], N=256 * choose.randint(1, 64))
                live.add(bench.address(lease.data), lease.nbytes)
                held.append(lease)
        for lease in held:
            live.remove(bench.address(lease.data))
            lease.release()

    bench.in_thread(*(lambda number=number: worker(number) for number in range(8)))
    require(ws.snapshot().allocated == 0, f"{ws.snapshot().allocated} bytes are lost")
    ws.synchronize()
    ws.trim()
    require(ws.snapshot().reserved == 0, f"{ws.snapshot().reserved} bytes do not go back")


@scenario("h1-data", "P", "fence", "declare")
def threads_with_readers_behind(bench: Bench) -> None:
    """Four threads, a stream each, hand what they fill to one shared stream that reads it late."""
    ws, streams = bench.ws, bench.streams(4)

    def worker(number: int) -> None:
        with ws.on(streams[number]):
            for step in range(bench.times(20)):
                value = 50 * number + step + 1
                with ws.lease(BLOCK, N=bench.mib(1 + number % 2)) as lease:
                    bench.fill(lease.data, value)
                    bench.order(streams[number], bench.main)
                    bench.slow(bench.main)
                    bench.expect(bench.copy(lease.data, bench.main), value)
                    ws.use(lease, bench.main)

    bench.in_thread(*(lambda number=number: worker(number) for number in range(4)))


@scenario("h1-released-elsewhere", "P", "fence", "declare")
def released_in_another_thread(bench: Bench) -> None:
    """A lease released by another thread, out of order, with a fork and a late use in flight."""
    ws, nbytes = bench.ws, bench.mib(2)
    (s1,) = bench.streams(1)
    first = ws.acquire(BLOCK, N=nbytes)
    second = ws.acquire(OTHER, N=nbytes)
    bench.fill(first.data, 1)
    bench.fill(second.data, 2)
    with ws.fork(s1) as branch, branch(s1):
        bench.copy(first.data)
    bench.slow(s1)
    bench.expect(bench.copy(first.data, s1), 1)
    ws.use(first, s1)

    def other() -> None:
        first.release()
        with ws.lease(BLOCK, N=nbytes) as again:
            bench.fill(again.data, 3)

    bench.in_thread(other)
    bench.expect(bench.copy(second.data), 2)
    with ws.fork(s1) as branch, branch(s1):
        bench.expect(bench.copy(second.data), 2)
    second.release()
    require(ws.snapshot().allocated == 0, f"{ws.snapshot().allocated} bytes are lost")


@scenario("h1-single", "P", "fence", "use")
def single_dies_in_another_thread(bench: Bench) -> None:
    """Single tensors die in another thread, and in the middle of an acquire, with a late use declared."""
    ws, nbytes = bench.ws, bench.mib(2)
    (s1,) = bench.streams(1)
    tensors = [ws.empty((nbytes,), torch.uint8) for _ in range(2)]
    for value, tensor in enumerate(tensors, 1):
        bench.fill(tensor, value)
        bench.order(bench.main, s1)
        bench.slow(s1)
        bench.expect(bench.copy(tensor, s1), value)
        ws.use(tensor, s1)
    del tensor
    bench.in_thread(tensors.pop)
    with ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 3)
    # The last reference goes while the library holds its lock, as when the collector runs inside an acquire.
    with ws.timeline.lock:
        tensors.clear()
        gc.collect(0)
    lease = ws.acquire(BLOCK, N=nbytes)
    bench.fill(lease.data, 4)
    bench.expect(bench.copy(lease.data), 4)
    lease.release()
    require(ws.snapshot().allocated == 0, f"{ws.snapshot().allocated} bytes are lost")


@scenario("h3", "P", no_control="nothing of the library routes another thread's torch.empty: there is no guard")
def torch_empty_beside_the_pool(bench: Bench) -> None:
    """While one thread leases and grows, another's torch.empty lands in no slab."""
    ws = bench.ws
    ready, done = threading.Event(), threading.Event()
    seen: list[tuple[int, int]] = []
    slabs: list[tuple[int, int]] = []

    def leases() -> None:
        for step in range(8):
            with ws.lease(BLOCK, N=bench.mib(2 + step)) as lease:
                bench.fill(lease.data, step + 1)
                slabs.append((bench.address(lease.data), lease.nbytes))
                ready.set()
        done.wait(10)

    def tensors() -> None:
        ready.wait(10)
        held = [bench.allocate(bench.mib(2)) for _ in range(4)]
        for tensor in held:
            bench.fill(tensor, 7)
            bench.expect(bench.copy(tensor), 7)
            seen.append((bench.address(tensor), bench.mib(2)))
        pool = getattr(ws.strategy_object, "pool", None)
        for slab in pool.slabs if pool is not None else ():
            for address, nbytes in seen:
                require(
                    address + nbytes <= slab.address or slab.address + slab.nbytes <= address,
                    "another thread's tensor lies in the pool",
                )
        done.set()

    bench.in_thread(leases, tensors)
