"""Sleep and wake: what goes, what stays, what is refused, and that a sleep happens whole or not at all."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.bookkeeping import check_books
from tests.workspace.scene import BYTES, MIB, OTHER, host, scene
from workspace import Workspace, spec
from workspace.errors import CaptureError, DriverError, GraphError, OutOfMemory, SleepError, WorkspaceError
from workspace.simulated import Device
from workspace.simulated.mapping import Mapping
from workspace.source import DriverSource

POOLED = ["event_fenced", "per_stream"]
EVERY = ["caching", *POOLED, "upstream", "unfenced"]
KEPT = pytest.mark.parametrize("restorable", [False, True], ids=["anew", "restorable"])


def used(ws: Workspace) -> None:
    """Leases of two sizes on two streams, again and again, so that blocks wait on shelves."""
    for _ in range(2):
        for stream in (ws.stream("main"), ws.stream("side")):
            with ws.on(stream), ws.lease(BYTES, N=MIB) as one, ws.lease(OTHER, N=3000) as two:
                ws.driver.memset(ws.driver.address_of(whole(one.x)), MIB, 1, stream.key)
                whole(two.y)


def whole(tensor: Any) -> Any:
    return tensor.tensor() if hasattr(tensor, "tensor") else tensor


@KEPT
@pytest.mark.parametrize("strategy", EVERY)
def test_every_strategy_sleeps_and_wakes(strategy: str, restorable: bool) -> None:
    """Nothing is reserved and nothing lent while asleep; as much as before when awake; twice is no error."""
    device, ws = host(strategy, restorable=restorable, allow_unsafe=True)
    used(ws)
    held, growths = ws.snapshot().reserved, ws.snapshot().growths
    assert ws.sleep() == held and ws.sleep() == 0 and ws.trim() == 0
    assert ws.snapshot().reserved == 0 and not ws.snapshot().slabs and ws.snapshot().asleep and device.memory.used == 0
    for asking in (lambda: ws.acquire(BYTES, N=MIB), lambda: ws.empty((4,), torch.uint8), ws.capture, ws.reserve):
        with pytest.raises(SleepError, match="wake"):
            asking()
    assert ws.wake() == held and not ws.asleep and ws.wake() == 0
    assert ws.snapshot().reserved == held and not ws.snapshot().asleep
    used(ws)
    assert ws.snapshot().reserved == held and ws.snapshot().growths == growths
    ws.sleep()
    ws.close()
    device.empty_cache()
    assert device.memory.used == 0 and ws.snapshot().reserved == 0


@pytest.mark.parametrize("strategy", EVERY)
def test_a_lease_made_before_the_sleep_is_refused_in_it(strategy: str) -> None:
    """Also one whose block would wait on a shelf, and one without bytes: the steady path knows of the sleep."""
    _, ws = scene(strategy, steady=True, allow_unsafe=True)
    used(ws)
    nothing = workspace.Layout("nothing", x=spec("N", dtype=torch.uint8))
    with ws.lease(nothing, N=0), ws.lease(BYTES, N=MIB):
        pass
    made = ws.lease(BYTES, N=MIB), ws.lease(nothing, N=0)
    ws.sleep()
    for lease in made:
        with pytest.raises(SleepError), lease:
            pass
    ws.wake()
    for lease in made:
        with lease:
            pass
    used(ws)


@pytest.mark.parametrize("strategy", POOLED)
def test_a_lease_under_way_in_another_thread_meets_the_sleep(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was let in and waits for the lock while the workspace falls asleep is refused; nothing grows."""
    _, ws = host(strategy)
    used(ws)
    let_in = threading.Event()
    found: list[object] = []
    lends_fake = Workspace.lends_fake

    def noticed(self: Workspace, lease: Any) -> bool:
        answer = lends_fake(self, lease)
        let_in.set()
        return answer

    monkeypatch.setattr(Workspace, "lends_fake", noticed)
    lease = ws.lease(BYTES, N=5 * MIB)

    def acquiring() -> None:
        try:
            with torch.no_grad(), lease:
                found.append(ws.snapshot().reserved)
        except SleepError as error:
            found.append(error)

    thread = threading.Thread(target=acquiring)
    with ws.timeline.lock:
        thread.start()
        assert let_in.wait(10)
        ws.sleep()
    thread.join()
    assert isinstance(found[0], SleepError) and ws.snapshot().reserved == 0


@KEPT
@pytest.mark.parametrize("strategy", POOLED)
def test_a_graph_lives_through_it_or_says_why_not(strategy: str, restorable: bool) -> None:
    """Kept addresses: valid again. Others: invalid for good, and the footprint went with it."""
    _, ws = host(strategy, restorable=restorable)
    with ws.on(ws.stream("main")):
        ws.declare(BYTES, N=MIB, lane="main")
        ws.reserve()
        with ws.capture() as capture, ws.lease(BYTES, N=MIB):
            pass
        ws.sleep()
        with pytest.raises(SleepError if restorable else GraphError):
            capture.graph.replay()
        ws.wake()
        if restorable:
            capture.graph.replay()
            assert ws.graphs == 1 and sum(ws.snapshot().footprints.values()) >= MIB
        else:
            for _ in range(2):
                with pytest.raises(GraphError, match=r"(?s)test_sleep.py.*restorable"):
                    capture.graph.replay()
            assert ws.graphs == 0 and not any(ws.snapshot().footprints.values())
        check_books(ws)
        capture.graph.release()
    ws.close()


@pytest.mark.parametrize("owned", [False, True], ids=["two workspaces", "an owner"])
def test_a_graph_of_two_workspaces_waits_for_both(owned: bool) -> None:
    """It is refused until every one whose bytes it uses is awake, and the refusal names the one that sleeps."""
    device, target = host(restorable=True, owners={"draft": "per_stream"})
    draft = target.owner("draft") if owned else workspace.create("per_stream", device=device, restorable=True)
    with target.on(target.stream("main")):
        for one in (target, draft):
            one.declare(BYTES, N=MIB, lane="main")
            one.reserve()
        with target.capture() as capture, target.lease(BYTES, N=MIB), draft.lease(BYTES, N=MIB):
            pass
        target.sleep()
        draft.sleep()
        for first, second in ((target, draft), (draft, target)):
            first.wake()
            for one in (target, draft):  # a workspace wakes its owners
                if one.asleep:
                    with pytest.raises(SleepError, match=repr(one)):
                        capture.graph.replay()
            second.wake()
            capture.graph.replay()
            second.sleep()
            with pytest.raises(SleepError, match=repr(second)):
                capture.graph.replay()
            first.sleep()
        target.wake()
        draft.wake()
        capture.graph.replay()


@KEPT
def test_a_view_of_the_unsafe_pool_keeps_its_slab(restorable: bool) -> None:
    """No strategy takes memory from behind a tensor that somebody holds; the owner is listed."""
    _, ws = host("unfenced", restorable=restorable, allow_unsafe=True)
    with ws.lease(BYTES, N=MIB) as lease:
        view = lease.x
    view.fill_(3)
    ws.sleep()
    assert ws.snapshot().reserved >= MIB and ws.snapshot().pinned == ("bytes",)
    assert view.unique().tolist() == [3]
    del view
    gc.collect()
    ws.wake()
    ws.sleep()
    assert ws.snapshot().reserved == 0 and ws.snapshot().pinned == ()


@pytest.mark.parametrize("strategy", POOLED)
def test_a_graph_without_bytes_is_nobodys_loss(strategy: str) -> None:
    """A graph that leases nothing stays valid where addresses are not kept."""
    _, ws = host(strategy)
    used(ws)
    with ws.on(ws.stream("main")):
        with ws.capture() as capture:
            pass
        ws.sleep()
        ws.wake()
        capture.graph.replay()


@KEPT
@pytest.mark.parametrize("strategy", POOLED)
def test_what_is_in_use_is_named_and_nothing_changes(strategy: str, restorable: bool) -> None:
    """Leases, single tensors and open captures stand against a sleep, each by its owner."""
    _, ws = host(strategy, restorable=restorable)
    used(ws)
    with ws.on(ws.stream("main")):
        lease = ws.acquire(BYTES, N=MIB)
        before = ws.snapshot()
        with pytest.raises(SleepError, match="bytes"):
            ws.sleep()
        assert ws.snapshot() == before
        lease.release()
        single = ws.empty((1000,), torch.uint8, owner="logits")
        with pytest.raises(SleepError, match="logits"):
            ws.sleep()
        del single
        with ws.capture() as capture:
            with pytest.raises(SleepError, match="open"):
                ws.sleep()
            with pytest.raises(CaptureError), ws.lease(BYTES, N=64 * MIB):
                pass
        capture.graph.release()
    ws.sleep()
    ws.wake()
    check_books(ws)


@KEPT
@pytest.mark.parametrize("strategy", EVERY)
def test_a_capture_or_replay_that_has_begun_stands_against_it(strategy: str, restorable: bool) -> None:
    """Host code between two segments of a graph cannot put the workspace to sleep under it."""
    _, ws = host(strategy, restorable=restorable, allow_unsafe=True)
    found: list[BaseException] = []

    def between() -> None:
        try:
            ws.sleep()
        except SleepError as error:
            found.append(error)

    with ws.on(ws.stream("main")):
        ws.declare(BYTES, N=MIB, lane="main")
        ws.reserve()
        with ws.capture() as capture, ws.lease(BYTES, N=MIB):
            capture.eager_break(between)
        capture.graph.replay()
    assert len(found) == 2 and all("ended" in str(one) for one in found)
    assert not ws.asleep


@pytest.mark.parametrize("strategy", [*POOLED, "unfenced"])
def test_a_replay_of_anothers_graph_stands_against_it(strategy: str) -> None:
    """Whoever captured it, and whoever asks: neither a graph that reads a lease nor a lane sleeps under a replay."""
    device, target = host(strategy, allow_unsafe=True)
    draft = workspace.create("event_fenced", device=device)
    found: list[BaseException] = []

    def elsewhere() -> None:
        for one in (draft, target):
            try:
                one.sleep()
            except SleepError as error:
                found.append(error)

    def between() -> None:
        if asked:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    asked = False
    with target.on(target.stream("main")):
        target.declare(BYTES, N=MIB, lane="main")
        target.reserve()
        lease = draft.acquire(BYTES, N=MIB)
        with target.capture() as capture, target.lease(BYTES, N=MIB):
            capture.eager_break(between)
        lease.release()
        asked = True
        for _ in range(2):
            capture.graph.replay()
        assert len(found) == 4 and not draft.asleep and not target.asleep
        draft.sleep()
        with pytest.raises(GraphError, match="before its capture"):
            capture.graph.replay()


@KEPT
@pytest.mark.parametrize("strategy", [*POOLED, "unfenced"])
def test_a_wake_that_finds_no_memory_changes_nothing(strategy: str, restorable: bool) -> None:
    """The device has room for one of two slabs only: the workspace sleeps on and holds nothing of it."""
    device = Device(memory="virtual", capacity=64 * MIB)
    ws = workspace.create(strategy, device=device, restorable=restorable, allow_unsafe=True)
    with ws.lease(BYTES, N=20 * MIB), ws.lease(OTHER, N=24 * MIB):
        pass
    held = ws.snapshot().reserved
    assert ws.sleep() == held == 44 * MIB
    taken = device.malloc(40 * MIB)
    with pytest.raises(OutOfMemory):
        ws.wake()
    assert ws.asleep and ws.snapshot().reserved == 0 and device.memory.used == 40 * MIB
    with pytest.raises(SleepError):
        ws.acquire(BYTES, N=MIB)
    device.free(taken)
    assert ws.wake() == held
    with ws.lease(BYTES, N=20 * MIB), ws.lease(OTHER, N=24 * MIB):
        assert ws.snapshot().reserved == held


def test_owners_sleep_with_their_workspace() -> None:
    """One that shares the strategy sleeps and wakes with it; one of its own is refused or put to sleep together."""
    _, ws = host(owners={"draft": "per_stream"})
    shared, own = ws.owner("indexer"), ws.owner("draft")
    for one in (ws, shared, own):
        used(one)
    held = ws.snapshot().reserved, own.snapshot().reserved
    lease = own.acquire(BYTES, N=MIB)
    with pytest.raises(SleepError, match="draft"):
        ws.sleep()
    assert not ws.asleep and not own.asleep and (ws.snapshot().reserved, own.snapshot().reserved) == held
    lease.release()
    assert shared.sleep() == sum(held)
    for one in (ws, shared, own):
        assert one.asleep and one.snapshot().reserved == 0
        with pytest.raises(SleepError):
            one.acquire(BYTES, N=MIB)
    assert ws.wake() == sum(held)
    for one in (ws, shared, own):
        used(one)
    assert own.sleep() == held[1] and not ws.asleep
    used(ws)
    assert ws.sleep() == held[0] and ws.wake() == sum(held)


@KEPT
def test_what_stays_is_listed(restorable: bool) -> None:
    """Persistent buffers keep their bytes, pinned memory is the host's: both are listed by name."""
    _, ws = host(restorable=restorable)
    used(ws)
    counter = ws.owner("mtp").persistent("counter", (4,), torch.int32)
    counter.fill_(7)
    ws.staging("metadata", 4096, slots=2)
    ws.sleep()
    asleep = ws.snapshot()
    assert asleep.persistent == {"mtp/counter": 16} and asleep.staging == {"metadata": 8192}
    ws.wake()
    assert ws.owner("mtp").persistent("counter", (4,), torch.int32).tolist() == [7] * 4


def test_refusals_are_explained() -> None:
    """Who was refused, where, and since when the workspace sleeps."""
    _, ws = host()
    used(ws)
    ws.sleep()
    with pytest.raises(SleepError, match="bytes asks"):
        ws.acquire(BYTES, N=MIB)
    (reason, _), *_ = [entry for entry in ws.explain() if entry[0].kind == "refusal"]
    assert reason.owner == "bytes" and "asleep since" in reason.edge
    assert "test_sleep.py" in reason.site and "test_sleep.py" in reason.edge


@KEPT
@pytest.mark.parametrize("strategy", POOLED)
def test_a_locked_workspace_wakes_locked(strategy: str, restorable: bool) -> None:
    """What a locked workspace gave up it may take again, and no more."""
    _, ws = host(strategy, restorable=restorable)
    used(ws)
    ws.lock()
    held = ws.snapshot().reserved
    assert ws.sleep() == held and ws.wake() == held and ws.locked
    used(ws)
    with pytest.raises(MemoryError):
        ws.acquire(BYTES, N=64 * MIB)


@KEPT
def test_statistics_guard_and_poison_sleep_too(restorable: bool) -> None:
    """Adaptors between lease and strategy count and fill as before."""
    _, ws = host(restorable=restorable, statistics=True, guard=256, poison=True)
    used(ws)
    ws.sleep()
    ws.wake()
    with ws.lease(BYTES, N=MIB) as lease:
        assert int(lease.x[0]) == 0xCB
    assert not any(owner.allocated for owner in ws.snapshot().owners.values())


def test_a_dropped_workspace_gives_its_mappings_back() -> None:
    """Memory that is no allocator's returns to the device, asleep or awake."""
    for asleep in (False, True):
        device, ws = host(restorable=True)
        used(ws)
        if asleep:
            ws.sleep()
        del ws
        gc.collect()
        with workspace.create("event_fenced", device=device) as other:
            used(other)
        device.empty_cache()
        assert device.memory.used == 0


def test_a_closed_workspace_neither_sleeps_nor_wakes() -> None:
    """Closing while asleep is fine; afterwards there is nothing to do."""
    _, ws = host()
    used(ws)
    ws.sleep()
    ws.close()
    with pytest.raises(WorkspaceError, match="closed"):
        ws.sleep()
    assert ws.wake() == 0


@pytest.mark.parametrize("strategy", EVERY)
def test_a_request_that_was_forgotten_is_refused_in_it(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After more sizes than are remembered, layouts and leases that are kept name the old ones still."""
    monkeypatch.setattr("workspace.workspace.REQUESTS_KEPT", 2)
    _, ws = scene(strategy, steady=True, allow_unsafe=True)
    nothing = workspace.Layout("nothing", x=spec("N", dtype=torch.uint8))
    kept = workspace.Layout("kept", x=spec("N", dtype=torch.uint8))

    made = ws.lease(nothing, N=0), ws.lease(kept, N=MIB)

    def every() -> list[Callable[[], Any]]:
        return [
            *(lease.__enter__ for lease in made),
            partial(ws.acquire, nothing, N=0),
            partial(ws.acquire, kept, N=MIB),
        ]

    for enter in every():
        enter().release()
    for nbytes in range(1, 5):
        with ws.lease(BYTES, N=nbytes):
            pass
    ws.synchronize()
    ws.sleep()
    for enter in every():
        with pytest.raises(SleepError):
            enter()
    ws.wake()
    for enter in every():
        enter().release()
    ws.close()
    for enter in every():
        with pytest.raises(workspace.WorkspaceError, match="is closed"):
            enter()


# -- what fails half-way -------------------------------------------------------------------------------------------


def _failing_at(patch: pytest.MonkeyPatch, where: Any, verb: str, turn: int, kind: type[BaseException]) -> None:
    """Have one call of a verb raise, the first being 1."""
    calls, inner = itertools.count(1), getattr(where, verb)

    def called(*arguments: Any, **named: Any) -> Any:
        if next(calls) == turn:
            raise kind("out of order")
        return inner(*arguments, **named)

    patch.setattr(where, verb, called)


THREE = [workspace.Layout(name, x=spec("N", dtype=torch.uint8)) for name in "abc"]


def _lease_all(ws: Workspace) -> None:
    """Of three sizes at a time, twice: each fills a slab of its own."""
    for _ in range(2):
        leases = [ws.acquire(layout, N=2 * place * MIB) for place, layout in enumerate(THREE, 1)]
        for lease in leases:
            lease.x.fill_(1)
            lease.release()


def _three_slabs(strategy: str, restorable: bool, **settings: Any) -> tuple[Device, Workspace, int]:
    device, ws = host(strategy, restorable=restorable, allow_unsafe=True, **settings)
    _lease_all(ws)
    assert len(ws.snapshot().slabs) == 3
    return device, ws, ws.snapshot().reserved


def _is_asleep(device: Device, ws: Workspace) -> None:
    """It lends nothing, not even what has memory still."""
    assert ws.asleep and ws.snapshot().asleep
    for nbytes in (MIB, 2 * MIB, 64 * MIB):
        with pytest.raises(SleepError):
            ws.acquire(BYTES, N=nbytes)


def _is_as_before(device: Device, ws: Workspace, held: int) -> None:
    assert ws.snapshot().reserved == held == sum(ws.snapshot().slabs)
    _lease_all(ws)
    assert ws.snapshot().reserved == held
    assert ws.sleep() == held and ws.snapshot().reserved == 0
    ws.close()
    device.empty_cache()
    assert device.memory.used == 0


@KEPT
@pytest.mark.parametrize("kind", [DriverError, KeyboardInterrupt, OutOfMemory])
@pytest.mark.parametrize("strategy", [*POOLED, "unfenced"])
def test_a_wake_that_fails_half_way_takes_nothing(
    strategy: str, restorable: bool, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the failure is: it sleeps on, holds nothing, and the next wake takes what was there, once."""
    for turn in (1, 2, 3):
        device, ws, held = _three_slabs(strategy, restorable)
        ws.sleep()
        with monkeypatch.context() as patch:
            _failing_at(patch, *((Mapping, "remap") if restorable else (ws.driver, "alloc")), turn, kind)
            with pytest.raises(kind, match="out of order"):
                ws.wake()
        _is_asleep(device, ws)
        assert ws.snapshot().reserved == 0 == device.memory.used and not ws.snapshot().slabs
        assert ws.sleep() == 0 and ws.wake() == held
        _is_as_before(device, ws, held)


@KEPT
@pytest.mark.parametrize("kind", [DriverError, KeyboardInterrupt])
@pytest.mark.parametrize("strategy", [*POOLED, "unfenced"])
@pytest.mark.parametrize("again", [True, False], ids=["sleeps again", "wakes"])
def test_a_sleep_that_fails_half_way_is_asleep(
    strategy: str, restorable: bool, kind: type[BaseException], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what has memory still nothing is lent; another sleep gives the rest, and a wake takes what was given."""
    for turn in (1, 2, 3):
        device, ws, held = _three_slabs(strategy, restorable)
        with monkeypatch.context() as patch:
            _failing_at(patch, *((Mapping, "unmap") if restorable else (DriverSource, "give_up")), turn, kind)
            with pytest.raises(kind, match="out of order"):
                ws.sleep()
        _is_asleep(device, ws)
        left = ws.snapshot().reserved
        assert (left == held) == (turn == 1) and left > 0
        if again:
            assert ws.sleep() == left and ws.snapshot().reserved == 0 == device.memory.used
            assert ws.wake() == held
        else:
            assert ws.wake() == held - left
        _is_as_before(device, ws, held)


@KEPT
@pytest.mark.parametrize("strategy", [*POOLED, "unfenced"])
@pytest.mark.parametrize("verb", ["trim", "reclaim"])
def test_a_device_that_keeps_what_was_given_is_asked_again(
    strategy: str, restorable: bool, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slabs are gone when the device fails to take their memory: no slab is given twice, and none is lost."""
    device, ws, held = _three_slabs(strategy, restorable)
    with monkeypatch.context() as patch:
        _failing_at(patch, ws.driver, verb, 1, DriverError)
        with contextlib.suppress(DriverError):
            ws.sleep()
    _is_asleep(device, ws)
    assert ws.sleep() == 0 == ws.snapshot().reserved and ws.wake() == held
    _is_as_before(device, ws, held)


@KEPT
def test_an_owner_that_cannot_wake_keeps_its_workspace_asleep(
    restorable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them or none, whatever the failure is, also where to give back fails, too."""
    device, ws = host(restorable=restorable, owners={"draft": "per_stream"})
    draft = ws.owner("draft")
    for one in (ws, draft):
        used(one)
    held = ws.sleep()
    for twice in (False, True):
        with monkeypatch.context() as patch:
            _failing_at(patch, *((Mapping, "remap") if restorable else (ws.driver, "alloc")), 2, KeyboardInterrupt)
            if twice:
                _failing_at(patch, ws.driver, "synchronize", 1, DriverError)
            with pytest.raises(KeyboardInterrupt) as raised:
                ws.wake()
        for one in (ws, draft):
            _is_asleep(device, one)
        assert bool(device.memory.used) == twice == bool(getattr(raised.value, "__notes__", ()))
    ws.sleep()
    assert device.memory.used == 0
    assert ws.wake() == held
    for one in (ws, draft):
        used(one)
    assert ws.snapshot().reserved + draft.snapshot().reserved == held
