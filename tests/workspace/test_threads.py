"""Several host threads: no overlap, no lost byte, releases from elsewhere, and deterministic interleavings."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest
import torch

from tests.workspace.bookkeeping import check_books, check_coalesced
from tests.workspace.scene import BYTES, OTHER, SLAB, scene, write
from workspace import Lease, Workspace
from workspace.simulated import Device

BLOCKS = ["event_fenced", "per_stream"]
THREADS, STEPS = 8, 600


def run_together(bodies: list[Callable[[], None]]) -> None:
    """Each in a thread of its own; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # change threads as often as the interpreter can
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for error in errors:
        raise error


class Loans:
    """Ranges on loan at this moment, over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, tuple[int, int]] = {}

    def add(self, key: int, address: int, nbytes: int) -> None:
        with self._lock:
            for start, length in self._ranges.values():
                assert address + nbytes <= start or start + length <= address, "two leases overlap"
            self._ranges[key] = address, nbytes

    def drop(self, key: int) -> None:
        with self._lock:
            del self._ranges[key]


def worker(device: Device, ws: Workspace, loans: Loans, seed: int) -> Callable[[], None]:
    """Random leases on two streams of its own, forks between them, and single tensors."""

    def body() -> None:
        chance = random.Random(seed)
        streams = [ws.stream(f"{seed}.{index}") for index in range(2)]
        for _ in range(STEPS):
            main, aux = chance.sample(streams, 2)
            nbytes = chance.choice([256, 300, 4096, 70_000])
            with ws.on(main), ws.lease(BYTES, N=nbytes) as lease:
                loans.add(id(lease), lease.x.data_ptr(), nbytes)
                device.launch("write", writes=[lease.x])
                kind = chance.randrange(4)
                if kind == 0:
                    with ws.fork(aux) as branch, branch(aux), ws.lease(OTHER, N=nbytes) as other:
                        device.launch("branch", reads=[lease.x], writes=[other.y])
                elif kind == 1:
                    tensor = ws.empty((nbytes,), torch.uint8)
                    device.launch("single", writes=[tensor])
                    del tensor
                device.launch("read", reads=[lease.x])
                loans.drop(id(lease))

    return body


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("steady", [False, True])
def test_random_threads_share_one_pool(strategy: str, steady: bool) -> None:
    """Eight threads with two streams each: live ranges are disjoint, uses are ordered, and all comes back."""
    device, ws = scene(strategy, steady=steady)
    loans = Loans()
    run_together([worker(device, ws, loans, seed) for seed in range(THREADS)])
    assert device.verdict() == "SAFE", device.races()[0]
    assert ws.snapshot().allocated == 0
    check_books(ws)
    check_coalesced(ws)
    ws.synchronize()
    ws.close()
    assert ws.snapshot().reserved == 0


@pytest.mark.parametrize("strategy", BLOCKS)
def test_threads_on_one_stream_take_turns_on_its_shelf(strategy: str) -> None:
    """The steady path pops and appends without a lock: no block is handed out twice."""
    device, ws = scene(strategy, steady=True)
    loans = Loans()

    def body() -> None:
        for _ in range(10 * STEPS):
            with ws.lease(BYTES, N=4096) as lease:
                loans.add(id(lease), lease.x.data_ptr(), 4096)
                loans.drop(id(lease))

    run_together([body] * THREADS)
    assert ws.snapshot().allocated == 0
    check_books(ws)


@pytest.mark.parametrize("steady", [False, True])
def test_a_release_from_another_thread(steady: bool) -> None:
    """The lease leaves its own thread's list, whatever that thread holds meanwhile."""
    device, ws = scene(steady=steady)
    write(device, ws, "warm", 4096, 0)
    first, second, third = (ws.acquire(BYTES, N=4096) for _ in range(3))
    run_together([second.release])
    assert list(ws.timeline.state.held) == [first, third]
    run_together([third.release])
    first.release()
    assert not ws.timeline.state.held and ws.snapshot().allocated == 0
    with ws.lease(BYTES, N=4096), ws.lease(BYTES, N=4096), ws.lease(BYTES, N=4096):
        pass
    check_books(ws)


def test_releases_from_elsewhere_while_the_owner_leases() -> None:
    """The owner's list of what it holds changes under both threads: every lease leaves it, and only it."""
    _, ws = scene(steady=True)
    handed: SimpleQueue[Lease | None] = SimpleQueue()

    def owner() -> None:
        for _ in range(STEPS):
            handed.put(ws.acquire(BYTES, N=4096))
            with ws.lease(BYTES, N=4096), ws.lease(OTHER, N=300):
                pass
        handed.put(None)
        released.wait(timeout=60)
        assert not ws.timeline.state.held

    def other() -> None:
        while (lease := handed.get(timeout=60)) is not None:
            lease.release()
        released.set()

    released = threading.Event()
    run_together([owner, other])
    assert ws.snapshot().allocated == 0
    check_books(ws)


def test_threads_have_current_streams_and_slots_of_their_own() -> None:
    """What one thread makes current, or enters, no other sees."""
    _, ws = scene(micro_batches=2)
    seen: list[tuple[int, str, int]] = []

    def look() -> None:
        state = ws.timeline.state
        seen.append((ws.driver.current_stream(), state.lane, state.micro_batch))

    with ws.on(ws.stream("main")), ws.slot(lane="draft", micro_batch=1):
        run_together([look])
        look()
    assert seen == [(0, "main", 0), (ws.stream("main").key, "draft", 1)]


def test_a_fork_declares_the_leases_of_its_own_thread() -> None:
    """A lease of another thread is not made to wait for this thread's branches."""
    device, ws = scene()
    main, aux = ws.stream("main"), ws.stream("aux")

    def elsewhere() -> None:
        with ws.fork(aux):
            pass
        device.launch("busy", stream=aux.key)

    with ws.on(main), ws.lease(BYTES, N=SLAB):
        run_together([elsewhere])
    write(device, ws, "next", SLAB, main)
    assert ws.snapshot().fences == 0


def test_captures_in_threads_of_one_lane() -> None:
    """Each thread captures and replays its own graphs while others lease: all of it is ordered."""
    device, ws = scene(reserve=4 * SLAB)

    def capturing(seed: int) -> Callable[[], None]:
        def body() -> None:
            stream = ws.stream(f"capture {seed}")
            for round_ in range(6):
                nbytes = 4096 * (round_ + 1)
                with ws.on(stream), ws.capture(f"lane {seed}") as capture, ws.lease(BYTES, N=nbytes) as lease:
                    device.launch("captured", writes=[lease.x])
                capture.graph.replay(stream)
                write(device, ws, "eager", 70_000, stream)
                capture.graph.release()

        return body

    loans = Loans()
    run_together([*(capturing(seed) for seed in range(3)), *(worker(device, ws, loans, seed) for seed in range(3))])
    assert device.verdict() == "SAFE" and ws.snapshot().footprints == {} and ws.snapshot().allocated == 0
    check_books(ws)
