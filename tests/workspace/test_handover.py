"""A shelved block that goes to another stream the short way: the long way's rule, with fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workspace.scene import BYTES, OTHER, SLAB, scene, write
from tests.workspace.steady_program import Program
from workspace import handover
from workspace.errors import CapacityError, DriverError
from workspace.lease import PLAIN, Lease
from workspace.pool import Pool
from workspace.simulated import Device
from workspace.timeline import Timeline
from workspace.workspace import Workspace


def shelved(ws: Workspace) -> list[int]:
    """Blocks on each shelf of the pool, and all that belong to it."""
    strategy: Any = ws.strategy_object
    return sorted(len(shelf) for shelf in strategy.pool.shelves)


def turns(ws: Workspace, *streams: Any, nbytes: int = SLAB) -> list[tuple[Any, bool]]:
    """A lease on each stream: its tensor, and whether it is in the state of one that took the short way."""
    found = []
    for stream in streams:
        with ws.on(stream), ws.lease(BYTES, N=nbytes) as lease:
            found.append((lease.x, lease._state == PLAIN))
    return found


SMALL = 1024
"""Bytes of which a crowded pool keeps blocks on shelves, too."""


def crowded(blocks: int) -> tuple[Device, Workspace, Any]:
    """A pool with room for so many small blocks beside a lease, which is returned."""
    device, ws = scene(steady=True, policy="fence", reserve=SLAB)
    return device, ws, ws.acquire(BYTES, N=SLAB - blocks * SMALL)


@pytest.mark.parametrize(
    ("seam", "verdict"),
    [
        (None, "SAFE"),
        ((Timeline, "fence", lambda *_: 0), "UNSAFE"),
        ((Timeline, "ordered", lambda *_: True), "UNSAFE"),
    ],
    ids=["kept", "without the fence", "without the check"],
)
def test_a_fence_between_two_streams(
    monkeypatch: pytest.MonkeyPatch, seam: tuple[type, str, Callable[..., object]] | None, verdict: str
) -> None:
    """Each turn is one record and one wait, on the same bytes; both forms leave out what is taken out."""
    device, ws = scene(steady=True, policy="fence", reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    if seam is not None:
        monkeypatch.setattr(*seam)
    before = device.counters.copy()
    for turn in range(3):
        write(device, ws, f"two {turn}", SLAB, two)
        write(device, ws, f"one {turn}", SLAB, one)
    made = device.counters - before
    assert device.verdict() == verdict
    if seam is None:
        assert (made["record"], made["wait"], made["alloc"]) == (6, 6, 0) and ws.snapshot().fences == 6


def test_a_handed_over_block_keeps_its_tensors() -> None:
    """The lease is in the plain state, as from the stream's own shelf, and the block comes back to the new one."""
    _, ws = scene(steady=True, policy="fence", reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    (first, _), *others = turns(ws, one, two, one, two, two)
    assert all(other is first and plain for other, plain in others)
    assert shelved(ws) == [0, 1] and ws.snapshot().fences == 3
    assert ws.trim() == SLAB and ws.snapshot().slabs == ()


def test_what_the_clocks_show_ordered_is_handed_over_without_a_fence() -> None:
    """The parent waits for its branch anyway."""
    device, ws = scene(steady=True, policy="fence", reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(two), ws.fork(one):
        write(device, ws, "branch", SLAB, one)
    before = device.counters.copy()
    write(device, ws, "parent", SLAB, two)
    made = device.counters - before
    assert (made["record"], made["wait"]) == (0, 0) and device.verdict() == "SAFE"
    assert ws.snapshot().fences == 0 and ws.snapshot().elided == 1


def test_an_ordered_block_comes_before_a_fence() -> None:
    """Of a shelf the one that is ordered, wherever it lies; of another request, after all shelves are emptied."""
    device, ws, _ = crowded(2)
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(one):
        early, late = ws.acquire(BYTES, N=SMALL), ws.acquire(BYTES, N=SMALL)
        early.release()
        event = ws.event()
        event.record()
        device.launch("late", writes=[late.x])
        late.release()
    with ws.on(two):
        event.wait()
        write(device, ws, "ordered", SMALL, two)
    assert ws.snapshot().fences == 0 and shelved(ws) == [1, 1] and device.verdict() == "SAFE"
    device, ws, _ = crowded(3)
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(two), ws.lease(OTHER, N=SMALL):
        between = ws.acquire(BYTES, N=SMALL)
        with ws.on(one), ws.lease(BYTES, N=SMALL):
            pass
    assert shelved(ws) == [1, 1] and not between.released
    write(device, ws, "ordered", SMALL, two)
    assert ws.snapshot().fences == 0 and device.verdict() == "SAFE"


def test_a_free_block_that_fits_is_looked_at_first() -> None:
    """It is ordered here, so that there is no fence."""
    _, ws, _ = crowded(2)
    (first, _), (second, plain) = turns(ws, ws.stream("one"), ws.stream("two"), nbytes=SMALL)
    assert first is not second and not plain and ws.snapshot().fences == 0


@pytest.mark.parametrize("settings", [{"policy": "grow,fence"}, {"in_flight": 4}, {"recording": "exact"}])
def test_other_wishes_go_the_long_way(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """Growth before a fence, and events recorded at release, are what it looks at; a locked pool cannot grow."""
    handed: list[Any] = []
    monkeypatch.setattr(handover, "_ready", lambda *given: handed.append(given))
    _, ws = scene(steady=True, reserve=SLAB, **settings)
    one, two = ws.stream("one"), ws.stream("two")
    for stream in (one, two):
        with ws.on(stream), ws.lease(BYTES, N=SLAB):
            pass
    grew = ws.snapshot().growths
    assert not handed and grew == (settings.get("recording") != "exact")


def test_a_locked_pool_hands_over_whatever_would_grow() -> None:
    """The fence is all there is."""
    _, ws = scene(steady=True, policy="grow,fence", reserve=SLAB)
    ws.lock()
    one, two = ws.stream("one"), ws.stream("two")
    (first, _), (second, _), (third, _) = turns(ws, one, two, one)
    assert first is second is third and ws.snapshot().fences == 2
    ws.unlock()
    with ws.on(two), ws.lease(BYTES, N=SLAB):
        assert ws.snapshot().fences == 2 and ws.snapshot().growths == 1


@pytest.mark.parametrize("verb", ["record", "wait"])
def test_a_fence_that_fails_leaves_the_block_where_it_was(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The error arrives, nothing is on lease, and the next fence is made."""
    device, ws = scene(steady=True, policy="fence", reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)

    def failing(*arguments: int) -> None:
        raise DriverError("out of order")

    monkeypatch.setattr(ws.driver, verb, failing)
    with pytest.raises(DriverError, match="out of order"):
        write(device, ws, "never", SLAB, two)
    monkeypatch.undo()
    assert ws.snapshot().allocated == 0 and shelved(ws) == [1] and ws.snapshot().fences == 0
    write(device, ws, "second", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 1


def test_a_stream_that_captures_unseen_is_not_recorded_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for an event of its capture would draw the waiter into it; the other way refuses, or grows."""
    device, ws = scene(steady=True, policy="fence", reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    capture_of = ws.driver.capture_of
    monkeypatch.setattr(ws.driver, "capture_of", lambda key: 7 if key == one.key else capture_of(key))
    before = device.counters.copy()
    with pytest.raises(CapacityError):
        write(device, ws, "never", SLAB, two)
    assert (device.counters - before)["record"] == 0 and ws.snapshot().fences == 0


def test_fences_are_explained_by_call_site() -> None:
    """Each place is counted, also where one request fences at more places than it remembers."""
    _, ws = scene(steady=True, policy="fence", reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(one), ws.lease(BYTES, N=SLAB):
        pass
    for _ in range(5):
        with ws.on(two), ws.lease(BYTES, N=SLAB):
            pass
        with ws.on(one), ws.lease(BYTES, N=SLAB):
            pass
    places = 20
    for number in range(places):
        code = compile("\n" * number + "with ws.on(stream), ws.lease(BYTES, N=SLAB): pass", "somewhere.py", "exec")
        exec(code, {"ws": ws, "stream": (two, one)[number % 2], "BYTES": BYTES, "SLAB": SLAB})
    found = {reason.site: (reason.edge, times) for reason, times in ws.explain(100)}
    mine = [times for site, (_, times) in found.items() if "test_handover" in site]
    assert mine == [5, 5] and sum(times for _, times in found.values()) == ws.snapshot().fences == 10 + places
    assert {f"somewhere.py:{number + 1}" for number in range(places)} < found.keys()
    assert next(iter(found.values()))[0].startswith("two knows one up to 0, needs ")


def test_a_finaliser_in_the_middle_of_an_acquire_is_handed_nothing() -> None:
    """What the interrupted acquire is doing to the pool must not change under it."""
    _, ws = scene(steady=True, policy="fence", reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    turns(ws, one)
    lease = ws.lease(BYTES, N=SLAB)
    with ws.on(two), ws.timeline.lock, pytest.raises(Exception, match="in the middle of another acquire"):
        lease.__enter__()
    assert shelved(ws) == [1] and ws.snapshot().fences == 0


@pytest.mark.parametrize("fenced", [True, False], ids=["with its fences", "without them"])
def test_random_programs_need_the_fences(monkeypatch: pytest.MonkeyPatch, fenced: bool) -> None:
    """In small slabs, where streams take blocks from each other's shelves."""
    if not fenced:
        monkeypatch.setattr(Timeline, "fence", lambda *_: 0)
    verdicts = {Program("event_fenced", seed, granularity=512).run()[6] for seed in range(8)}
    assert ("UNSAFE" in verdicts) != fenced


def test_a_fence_is_made_only_where_the_long_way_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside every fence of the short way: emptied shelves would have left no ordered block that fits."""
    fenced: list[int] = []
    ready = handover._ready

    def checked(pool: Any, request: Any, block: Any, stream: Any) -> bool:
        before = pool.timeline.fences
        done = ready(pool, request, block, stream)
        if pool.timeline.fences > before:
            fenced.append(request.nbytes)
            stream.clock.seen = seen_up_to(stream, block, before_epochs[0].get(block.stream.id, 0))
            assert not _fits(pool, request.nbytes, stream, {block, *pool.shelved()})
            stream.clock.seen = seen_up_to(stream, block, block.stream.last.epoch)
        return done

    before_epochs = [{}]  # type: ignore[var-annotated]

    def seen_up_to(stream: Any, block: Any, epoch: int) -> Any:
        seen = stream.clock.seen.copy()
        seen[block.stream.id] = epoch
        return seen

    def peeked(self: Lease) -> Any:
        request = self.request
        if request.lender is not None:
            before_epochs[0] = dict(request.timeline.current().clock.seen)
        return original(self)

    original = Lease._from_another_shelf
    monkeypatch.setattr(Lease, "_from_another_shelf", peeked)
    monkeypatch.setattr(handover, "_ready", checked)
    for seed in range(8):
        Program("event_fenced", seed, granularity=512).run()
    assert fenced


def _fits(pool: Any, nbytes: int, stream: Any, shelved: set[Any]) -> bool:
    """Whether free and shelved neighbours whose uses are ordered make a block of so many bytes."""
    for slab in pool.slabs:
        run = 0
        for block in slab.blocks():
            usable = block.state == "free" or block in shelved
            run = run + block.nbytes if usable and pool.timeline.ordered(block, stream) else 0
            if run >= nbytes:
                return True
    return False


@pytest.mark.parametrize("together", [True, False])
def test_free_neighbours_that_are_ordered_come_before_a_fence(monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    """Two halves that other streams used, joined since. Control: each alone is too small, and the block is fenced."""
    if not together:
        monkeypatch.setattr(Pool, "runs", lambda pool, *usable: [])
    device, ws = scene(steady=True, policy="fence", reserve=2 * SLAB)
    main, other, *sides = (ws.stream(name) for name in ("main", "other", "one", "two"))
    whole = ws.acquire(BYTES, N=SLAB, stream=other)
    with ws.on(main):
        with ws.fork(*sides) as branch:
            for stream in sides:
                with branch(stream):
                    write(device, ws, "half", SLAB // 2, stream)
        strategy: Any = ws.strategy_object
        strategy.pool.consolidate()
        device.launch("whole", writes=[whole.x], stream=other.key)
        whole.release()
        with ws.lease(BYTES, N=SLAB) as lease:
            device.launch("again", writes=[lease.x])
    assert ws.snapshot().fences == (0 if together else 1)
    assert device.verdict() == "SAFE"
