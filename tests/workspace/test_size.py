"""Sizes: reserve, phases, lanes, micro-batches, headroom, lock, capacity, trim, out of memory, owners."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.bookkeeping import check_books, check_coalesced
from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, host, scene, write
from workspace import Layout, spec
from workspace.clocks import Clocks
from workspace.errors import CapacityError, CaptureError, LockError, OutOfMemory
from workspace.pool import Pool
from workspace.reservation import Reservation
from workspace.simulated import Device
from workspace.single import Persistent
from workspace.strategies.pooled import Pooled

BLOCKS = ["event_fenced", "per_stream"]


@pytest.mark.parametrize(
    ("declared", "settings", "nbytes"),
    [
        ([{"N": 1000}], {}, 1024),
        ([{"N": 1000}, {"N": 500}], {}, 1024),
        ([{"N": 1000, "count": 3}], {}, 3072),
        ([{"N": 1000, "phase": "a"}, {"N": 3000, "phase": "b"}], {}, 3072),
        ([{"N": 1000, "phase": "a"}, {"N": 3000, "phase": "b"}, {"N": 200}], {}, 3328),
        ([{"N": 1000}], {"micro_batches": 2}, 2048),
        ([{"N": 1000, "lane": "decode"}], {"micro_batches": 2}, 1024),
        ([{"N": 1000, "lane": "decode"}, {"N": 1000, "lane": "draft"}, {"N": 1000}], {"micro_batches": 2}, 4096),
        ([{"N": 1000}], {"headroom": 1.5}, 1536),
        ([{"N": 1000}], {"headroom": 1.1}, 1280),
        ([{"N": 1000}], {"guard": 256}, 1536),
        ([{"N": 0}], {}, 0),
        ([], {}, 0),
    ],
)
def test_a_reservation_adds_up(declared: list[dict[str, Any]], settings: dict[str, Any], nbytes: int) -> None:
    """The largest phase, every lane, the leases of all micro-batches, times the headroom."""
    _, ws = host(**settings)
    for one in declared:
        ws.declare(BYTES, **one)
    assert ws.reserve() == nbytes
    assert ws.snapshot().reserved >= nbytes and ws.snapshot().growths == 0


def test_two_layouts_in_one_phase_add_up() -> None:
    """Phases compare sums, and leases of one phase live together."""
    _, ws = scene()
    ws.declare(BYTES, N=1000, phase="a")
    ws.declare(OTHER, N=1000, phase="a")
    ws.declare(BYTES, N=1500, phase="b")
    assert ws.reserve() == 2048
    assert bool(ws._reservation) and not bool(Reservation())


@pytest.mark.parametrize("strategy", BLOCKS)
def test_what_was_declared_fits_locked(strategy: str) -> None:
    """One slab, so that the largest layout fits at any offset the pool chooses; nothing grows."""
    _, ws = scene(strategy)
    wide = Layout("wide", x=spec("N", dtype=torch.uint8, align=4096))
    ws.declare(BYTES, N=SLAB, count=2)
    ws.declare(wide, N=100_000)
    ws.reserve()
    ws.lock()
    before = ws.snapshot().slabs
    for _ in range(3):
        with ws.lease(BYTES, N=SLAB), ws.lease(wide, N=100_000), ws.lease(BYTES, N=SLAB):
            pass
    assert ws.snapshot().slabs == before and len(before) == 1 and ws.snapshot().growths == 0


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_second_reservation_adds_what_is_missing(strategy: str) -> None:
    """Twice is no error; a larger declaration gives one larger slab."""
    _, ws = scene(strategy)
    ws.declare(BYTES, N=MIB)
    ws.reserve()
    ws.reserve()
    assert len(ws.snapshot().slabs) == 1
    ws.declare(BYTES, N=5 * MIB)
    ws.reserve()
    ws.lock()
    with ws.lease(BYTES, N=5 * MIB):
        pass
    check_books(ws)


def test_reserve_is_refused_inside_a_capture() -> None:
    """It allocates."""
    _, ws = scene(reserve=MIB)
    with ws.on(ws.stream("main")), ws.capture(), pytest.raises(CaptureError, match="before the capture"):
        ws.reserve()


# -- lock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", BLOCKS)
def test_growth_under_lock_is_refused_with_everything_there_is_to_know(strategy: str) -> None:
    """Owner, bytes asked and there, site, slot, stream and setting; state is as before (vllm#41565)."""
    _, ws = scene(strategy, reserve=3 * MIB, micro_batches=2)
    ws.lock()
    assert ws.locked
    reserved = ws.snapshot().reserved
    with ws.slot(lane="decode", micro_batch=1), ws.on(ws.stream("main")), pytest.raises(CapacityError) as caught:
        ws.acquire(OTHER, N=12 * MIB)
    text, fields = str(caught.value), caught.value.fields
    for part in ("other", str(12 * MIB), str(reserved), "decode", "micro-batch 1", "main", "headroom", __file__):
        assert part in text
    assert fields["owner"] == "other" and fields["asked"] == 12 * MIB and fields["capacity"] == reserved
    assert (fields["lane"], fields["micro_batch"], fields["stream"]) == ("decode", 1, "main")
    assert fields["setting"] == "headroom" and str(fields["site"]).startswith(__file__)
    assert isinstance(caught.value, MemoryError) and not isinstance(caught.value, AssertionError)
    assert ws.snapshot().allocated == 0 and ws.snapshot().reserved == reserved
    with ws.lease(BYTES, N=2 * MIB):
        pass


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_refusal_names_what_is_on_lease(strategy: str) -> None:
    """The most first: a lease that nobody released is found by its owner."""
    _, ws = scene(strategy, reserve=4 * MIB)
    ws.lock()
    held = [ws.owner(f"model{part}").acquire(BYTES, N=(part + 1) * 1024) for part in range(5)]
    listed = "model4/bytes 5120, model3/bytes 4096, model2/bytes 3072, 2 more"
    with pytest.raises(CapacityError, match=rf"15360 on lease: {listed}\)(.|\n)*release what is on lease, declare"):
        ws.acquire(BYTES, N=8 * MIB)
    for one in held:
        one.release()
    with pytest.raises(CapacityError, match=r"\(0 on lease\)(.|\n)*remedy: declare"):
        ws.acquire(BYTES, N=8 * MIB)


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_lock_with_nothing_reserved_says_so(strategy: str) -> None:
    """What was declared is not the cause."""
    _, ws = scene(strategy)
    ws.declare(BYTES, N=MIB)
    ws.lock()
    with pytest.raises(CapacityError, match=r"remedy: call reserve\(\) before lock\(\)"):
        ws.acquire(BYTES, N=MIB)


@pytest.mark.parametrize("strategy", BLOCKS)
def test_what_is_declared_after_lock_must_fit(strategy: str) -> None:
    """Else it would be refused at its lease only; unlocked, it is reserved. What was declared, or fits, is no error."""
    _, ws = scene(strategy, reserve=SLAB - 1024, micro_batches=2)
    ws.lock()
    for nbytes in (SLAB - 1024, 1024):
        ws.declare(BYTES, N=nbytes)
    ws.owner("draft").declare(BYTES, N=1024)  # in the rest of the slab
    with pytest.raises(LockError, match=rf"other\(N={SLAB}\): {SLAB} bytes is declared after lock\(\)") as caught:
        ws.owner("draft").declare(OTHER, N=SLAB)
    assert (caught.value.fields["capacity"], caught.value.fields["asked"]) == (ws.snapshot().reserved, 4 * SLAB)
    assert "unlock() first" in caught.value.remedy
    assert ws.reserve() == 2 * SLAB  # nothing has changed
    ws.unlock()
    ws.declare(OTHER, N=SLAB)
    ws.reserve()
    ws.lock()
    with ws.lease(OTHER, N=SLAB):
        pass


@pytest.mark.parametrize("strategy", BLOCKS)
def test_what_was_declared_before_a_lock_without_reserve_may_be_declared_again(strategy: str) -> None:
    """It is no more than before; what more is, is refused though nothing is held."""
    _, ws = scene(strategy)
    ws.declare(BYTES, N=MIB)
    ws.lock()
    ws.declare(BYTES, N=MIB)
    with pytest.raises(LockError, match="holds 0"):
        ws.declare(BYTES, N=2 * MIB)


@pytest.mark.parametrize("strategy", ["caching", "upstream", "unfenced"])
def test_without_a_pool_anything_is_declared_after_lock(strategy: str) -> None:
    """The lock has no effect there, or is that of each layout's place."""
    _, ws = scene(strategy, allow_unsafe=True)
    ws.lock()
    ws.declare(BYTES, N=SLAB)


def test_lock_and_unlock() -> None:
    """Twice is no error; unlocked, the pool grows again."""
    _, ws = scene(reserve=MIB)
    ws.lock()
    ws.lock()
    ws.unlock()
    ws.unlock()
    assert not ws.locked
    with ws.lease(BYTES, N=8 * MIB):
        pass


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_locked_pool_fences_rather_than_refuses(strategy: str) -> None:
    """Bytes that another stream used last are waited for."""
    device, ws = scene(strategy, reserve=SLAB)
    ws.lock()
    write(device, ws, "one", SLAB, ws.stream("one"))
    write(device, ws, "two", SLAB, ws.stream("two"))
    assert ws.snapshot().fences == 1 and device.verdict() == "SAFE"


def test_micro_batch_slots_grow_together() -> None:
    """Slot 0 was warmed with 64 MiB; locked, slot 1 gets as much (vllm#41858)."""
    device, ws = scene(micro_batches=2)
    with ws.slot(micro_batch=0), ws.lease(BYTES, N=64 * MIB):
        pass
    ws.lock()
    with ws.slot(micro_batch=0):
        zero = ws.acquire(BYTES, N=64 * MIB)
    with ws.slot(micro_batch=1), ws.on(ws.stream("one")):
        one = ws.acquire(BYTES, N=64 * MIB)
    device.launch("both", writes=[zero.x])
    device.launch("both", writes=[one.x], stream=ws.stream("one").key)
    assert device.verdict() == "SAFE"


def test_a_locked_workspace_keeps_its_reservation() -> None:
    """Trimmed, by hand or after running out of memory, it still serves what was declared."""
    _, ws = scene(reserve=SLAB)
    ws.lock()
    assert ws.trim() == 0
    with ws.lease(BYTES, N=SLAB):
        pass


# -- capacity ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_capacity_bounds_all_slabs(strategy: str) -> None:
    """Idle slabs make room; what is in use is named in the refusal."""
    _, ws = scene(strategy, capacity=8 * MIB)
    for size in (2, 3, 5, 8):
        with ws.lease(BYTES, N=size * MIB):
            pass
        assert ws.snapshot().reserved <= 8 * MIB
    with ws.lease(BYTES, N=8 * MIB), pytest.raises(CapacityError, match="capacity=8388608") as caught:
        ws.acquire(OTHER, N=MIB)
    assert caught.value.fields["setting"] == "capacity" and caught.value.fields["asked"] == MIB
    assert ws.snapshot().allocated == 0
    with pytest.raises(CapacityError):
        ws.acquire(OTHER, N=9 * MIB)
    check_coalesced(ws)


def test_sizes_that_creep_up_waste_little() -> None:
    """64, 64.5, ... 128 MiB, each once: idle, the pool holds at most 1.25 times the largest (vllm#55569)."""
    _, ws = scene()
    for half in range(128, 257):
        with ws.lease(BYTES, N=half * MIB // 2):
            pass
    assert ws.snapshot().reserved <= 1.25 * 128 * MIB
    assert ws.snapshot().peak_reserved <= 1.25 * 128 * MIB


@pytest.mark.parametrize("in_flight", [0, 2])
def test_a_host_far_ahead_holds_few_blocks(in_flight: int) -> None:
    """200 steps ahead of a reader, at most the blocks the setting leaves in flight, and one (pytorch#147168)."""
    device, ws = scene(in_flight=in_flight)
    aux = ws.stream("aux")
    for _ in range(200):
        with ws.lease(BYTES, N=32 * MIB) as lease:
            device.launch("write", writes=[lease.x])
            event = ws.event()
            event.record()
            event.wait(aux)
            lease.use(aux)
            device.launch("read", reads=[lease.x], stream=aux.key)
    assert device.verdict() == "SAFE"
    assert ws.snapshot().peak_reserved <= (in_flight + 1) * 32 * MIB


# -- out of memory, trim, retire -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
@pytest.mark.parametrize("how", ["a lease", "a reservation"])
def test_growth_that_fails_keeps_what_was_reserved(strategy: str, how: str) -> None:
    """Idle bytes that were given up for a slab the device does not have are obtained again."""
    device, ws = scene(strategy, memory=100 * MIB, reserve=40 * MIB)
    blocker = device.alloc(20 * MIB)
    kept = ws.snapshot().reserved
    with pytest.raises(CapacityError):
        if how == "a lease":
            ws.acquire(BYTES, N=90 * MIB)
        else:
            ws.declare(OTHER, N=90 * MIB)
            ws.reserve()
    assert ws.snapshot().reserved == kept and ws.snapshot().allocated == 0
    growths = ws.snapshot().growths
    ws.lock()
    with ws.lease(BYTES, N=40 * MIB) as lease:
        device.launch("write", writes=[lease.x])
    assert ws.snapshot().growths == growths and device.verdict() == "SAFE"
    del blocker


@pytest.mark.parametrize("ordered", [True, False])
def test_pieces_of_several_streams_serve_a_large_lease_together(ordered: bool) -> None:
    """Under lock, something else on loan: neighbours that other streams left are one block, fenced if need be."""
    device, ws = scene("per_stream", reserve=2 * MIB)
    ws.lock()
    one, two = ws.stream("one"), ws.stream("two")
    small = ws.acquire(BYTES, N=1024, stream=one)
    held = [ws.acquire(BYTES, N=64 << 10, stream=(one, two)[turn % 2]) for turn in range(31)]
    for lease in held:
        device.launch("fill", writes=[lease.x], stream=lease.stream.key)
        lease.release()
    if ordered:
        ws.synchronize()
    with ws.on(one), ws.lease(BYTES, N=256 << 10) as large:
        device.launch("write", writes=[large.x])
    small.release()
    assert device.verdict() == "SAFE" and (ws.snapshot().fences > 0) is not ordered
    check_books(ws)


def test_running_out_of_device_memory_is_typed_and_survived() -> None:
    """Idle slabs are given up first; then the error, and the pool serves what it can."""
    _, ws = scene(memory=16 * MIB)
    with ws.lease(BYTES, N=10 * MIB):
        pass
    with ws.lease(BYTES, N=12 * MIB):
        with pytest.raises(OutOfMemory):
            ws.acquire(BYTES, N=6 * MIB)
        assert ws.snapshot().allocated == 12 * MIB
    with ws.lease(BYTES, N=14 * MIB):
        pass
    check_books(ws)


@pytest.mark.parametrize("error", [OutOfMemory("device"), torch.OutOfMemoryError("torch"), CapacityError("here")])
def test_one_retry_after_out_of_memory(error: Exception) -> None:
    """Idle slabs are trimmed, the function is called once more; other errors pass."""
    device, ws = scene()
    with ws.lease(BYTES, N=SLAB):
        pass
    calls: list[int] = []

    def first_fails() -> str:
        calls.append(ws.snapshot().reserved)
        if len(calls) == 1:
            raise error
        return "done"

    assert ws.retry_on_oom(first_fails) == "done" and calls == [SLAB, 0]
    assert device.memory.used == 0
    with pytest.raises(type(error)):
        ws.retry_on_oom(lambda: (_ for _ in ()).throw(error))
    with pytest.raises(KeyError):
        ws.retry_on_oom(lambda: {"found": 1}["missing"])


@pytest.mark.parametrize("strategy", BLOCKS)
def test_trim_gives_idle_slabs_back(strategy: str) -> None:
    """Also when streams have divided one between them; never during a capture, nor what is on loan."""
    device, ws = scene(strategy)
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "one", 4096, one)
    ws.synchronize()
    write(device, ws, "two", 8192, two)
    assert ws.trim() == SLAB
    write(device, ws, "one", SLAB, one)
    with ws.lease(BYTES, N=4 * SLAB, stream=two):
        ws.trim()
        assert ws.snapshot().slabs == (4 * SLAB,)
    with ws.on(one), ws.capture():
        assert ws.trim() == 0
    assert ws.trim() == 4 * SLAB and ws.snapshot().reserved == 0 and device.memory.used == 0
    assert device.verdict() == "SAFE"


def test_trimmed_bytes_wait_for_their_uses() -> None:
    """The framework's allocator may give them to anybody at once: the host has seen them idle."""
    device, ws = scene()
    one = ws.stream("one")
    write(device, ws, "late", SLAB, one)
    ws.trim()
    buffer = device.empty((SLAB,), torch.uint8, 0)
    device.launch("theirs", writes=[buffer])
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize("how", ["trim", "growth", "close"])
def test_a_slab_that_somebody_views_is_retired(how: str) -> None:
    """Reported by owner and counted as reserved, until the view dies (vllm#56902)."""
    _, ws = host()
    with ws.lease(BYTES, N=SLAB) as lease:
        view = lease.x[5:]
    del lease
    if how == "trim":
        ws.trim()
    elif how == "growth":
        with ws.lease(BYTES, N=2 * SLAB):
            pass
        ws.trim()
    else:
        ws.close()
    snapshot = ws.snapshot()
    assert snapshot.retired == SLAB and snapshot.pinned == ("bytes",) and snapshot.slabs == ()
    assert snapshot.reserved == SLAB
    view.fill_(1)
    del view
    assert ws.snapshot().retired == 0 and ws.snapshot().reserved == 0


# -- owners and several workspaces -------------------------------------------------------------------------------


def test_an_owner_has_the_strategy_the_setting_names() -> None:
    """Others share the common one; the same name is the same workspace."""
    _, ws = scene(owners={"indexer": "per_stream", "mlp": "caching"})
    assert ws.owner("indexer").strategy == "per_stream" and ws.owner("mlp").strategy == "caching"
    assert ws.owner("other").provider is ws.provider and ws.owner("indexer") is ws.owner("indexer")
    with ws.owner("other").lease(BYTES, N=100) as one, ws.owner("indexer").lease(BYTES, N=100) as two:
        assert (one.owner, two.owner) == ("other/bytes", "indexer/bytes")
        assert "other/bytes" in ws.snapshot().owners


def test_lock_trim_and_close_reach_every_owner() -> None:
    """The root's lock is theirs, and so is its end."""
    device, ws = scene(owners={"indexer": "per_stream"})
    own = ws.owner("indexer")
    with own.lease(BYTES, N=100):
        pass
    ws.lock()
    with pytest.raises(CapacityError):
        own.acquire(BYTES, N=8 * MIB)
    ws.unlock()
    with own.lease(BYTES, N=8 * MIB):
        pass
    assert ws.trim() >= 8 * MIB
    held = own.acquire(BYTES, N=100)
    with pytest.raises(LockError, match="on lease"):
        ws.close()
    held.release()
    ws.close()
    device.empty_cache()
    assert device.memory.used == 0


@pytest.mark.parametrize("between", ["shares", "caching"])
def test_what_holds_for_an_owner_holds_for_its_owners(between: str) -> None:
    """Whether the one between shares the root's pool, or has a strategy of its own, whose config then is theirs."""
    owners = {"draft": "per_stream", "plain": "event_fenced"} | ({"model": between} if between != "shares" else {})
    _, ws = scene(owners=owners)
    model = ws.owner("model")
    draft, plain = model.owner("draft"), model.owner("plain")
    assert (draft.name, draft.strategy, draft.config.strategy) == ("model/draft", "per_stream", "per_stream")
    assert plain.strategy == plain.config.strategy == "event_fenced"
    assert (plain.provider is ws.provider) == (between == "shares")
    assert model.owner("other").config.strategy == model.strategy
    draft.declare(BYTES, N=MIB)
    assert ws.reserve() == MIB <= draft.snapshot().reserved
    ws.lock()
    with pytest.raises(CapacityError, match="model/draft/bytes"):
        draft.acquire(BYTES, N=8 * MIB)
    ws.unlock()
    with draft.lease(BYTES, N=8):
        for refused in (ws.sleep, ws.close):
            with pytest.raises(workspace.WorkspaceError, match="on lease|on loan"):
                refused()
            assert (draft.closed, draft.asleep) == (False, False)
    ws.sleep()
    assert (draft.asleep, draft.snapshot().reserved) == (True, 0)
    ws.wake()
    assert (draft.asleep, draft.snapshot().reserved >= MIB) == (False, True)
    assert ws.trim() >= MIB
    draft.close()
    assert ws.reserve() == 0
    ws.close()
    assert plain.closed


def test_close_is_refused_while_bytes_are_on_loan() -> None:
    """Leases and single tensors; the error counts them, and the workspace goes on."""
    _, ws = scene()
    held = ws.acquire(BYTES, N=1000)
    with pytest.raises(LockError, match=r"close\(\) of <.*> while 1024 bytes are on lease: bytes 1024\n"):
        ws.close()
    held.release()
    single = ws.empty((1000,), torch.uint8)
    with pytest.raises(LockError, match="1024 bytes"):
        ws.close()
    del single
    with ws as entered:
        assert entered is ws
    with pytest.raises(workspace.WorkspaceError, match="closed"):
        ws.acquire(BYTES, N=1)


@pytest.mark.parametrize("strategy", ["caching", "event_fenced", "per_stream"])
@pytest.mark.parametrize("owner", [False, True])
def test_close_is_refused_while_a_capture_is_open(strategy: str, owner: bool) -> None:
    """In it and in its eager breaks, as in those of a replay, also where it has leased nothing; another's does not."""
    _, root = scene(strategy, owners={"draft": strategy})
    ws = root.owner("draft") if owner else root
    other = workspace.create(strategy, device=root.device)
    refused = []

    def close() -> None:
        with pytest.raises(LockError, match="is open|is under way|graphs exist"):
            ws.close()
        refused.append(ws.closed)

    with ws.on(ws.stream("main")):
        with ws.capture() as capture:
            close()
            capture.eager_break(close)
            other.close()
        capture.graph.replay()
    assert refused == [False] * 3
    capture.graph.release()
    root.close()
    assert ws.closed


def test_workspaces_of_a_device_share_streams_and_clocks() -> None:
    """Target and draft: order made through one is known to the other; their bytes are their own."""
    device = Device(memory="virtual")
    target, draft = (workspace.create("event_fenced", device=device) for _ in range(2))
    assert target.timeline is draft.timeline and target.stream("aux") is draft.stream("aux")
    aux = target.stream("aux")
    write(device, draft, "draft", SLAB, 0)
    with target.fork(aux):
        pass
    write(device, draft, "draft on aux", SLAB, aux)
    assert draft.snapshot().fences == 0 and device.verdict() == "SAFE"
    with target.lease(BYTES, N=SLAB) as one, draft.lease(BYTES, N=SLAB) as two:
        assert one.x.data_ptr() != two.x.data_ptr()


def test_a_stream_has_one_name_and_one_kind() -> None:
    """Asking again gives the same one; with another ``communication`` it is refused."""
    _, ws = scene()
    assert ws.stream("nccl", communication=True) is ws.stream("nccl", communication=True)
    with pytest.raises(workspace.errors.StreamError, match="one value for each name"):
        ws.stream("nccl")


@pytest.mark.parametrize("awaited", [True, False])
@pytest.mark.parametrize("owner", [True, False])
def test_a_dropped_workspace_awaits_what_uses_its_buffers(
    monkeypatch: pytest.MonkeyPatch, owner: bool, awaited: bool
) -> None:
    """A persistent buffer still written on a side stream is no other allocation's before that is over."""
    if not awaited:
        monkeypatch.setattr(Persistent, "clear", lambda buffers: buffers._buffers.clear())
    device, ws = scene()
    user = ws.owner("draft") if owner else ws
    kept = user.persistent("counter", (MIB,), torch.uint8)
    device.launch("still writing", writes=[kept], stream=ws.stream("aux").key)
    del ws, user, kept
    gc.collect()
    other = workspace.create("event_fenced", device=device)
    other.acquire(BYTES, N=100).release()  # an acquire does what finalisers left behind
    buffer = device.driver().alloc(MIB, 0)
    device.launch("new owner", writes=[(buffer.address, MIB)])
    assert device.verdict() == ("SAFE" if awaited else "UNSAFE")


def pool_of(ws: Any) -> Pool:
    found: Pool = ws.strategy_object.pool
    return found


@pytest.mark.parametrize(
    ("first", "kept", "growths"),
    [
        (16, None, 0),
        (8, None, 0),
        (16, ("take_back_large", None), 1),
        (8, ("leaves_room", True), 1),
    ],
    ids=["taken back", "of few that are taken", "left on its shelf", "left on its shelf in a sparse pool"],
)
def test_a_large_block_on_a_shelf_does_not_divide_what_a_large_request_needs(
    monkeypatch: pytest.MonkeyPatch, first: int, kept: tuple[str, Any] | None, growths: int
) -> None:
    """It was released when little was held, and stays uncut until a large request is searched for; not longer.

    What is cut meanwhile lies behind it otherwise, and the bytes at both sides are too few.
    """
    if kept is not None:
        monkeypatch.setattr(Pool, kept[0], lambda *_: kept[1])
    _, ws = scene(steady=True, reserve=64 * MIB)
    pool_of(ws).roomy = False
    ws.acquire(BYTES, N=first * MIB).release()
    with ws.lease(OTHER, N=8 * MIB), ws.lease(BYTES, N=56 * MIB):
        assert ws.snapshot().growths == growths


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize(("headroom", "searches"), [(8, 0), (1, 8)], ids=["sparse", "tight"])
def test_large_blocks_stay_uncut_in_a_sparse_pool(
    strategy: str, headroom: float, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that take turns find their own again. Control: in exactly the bytes of the larger one they cannot."""
    ws = workspace.create(strategy, device=Device(), granularity=MIB, statistics=False, headroom=headroom)
    for layout, nbytes in ((BYTES, 40 * MIB), (OTHER, 30 * MIB)):
        ws.declare(layout, phase=layout.name, N=nbytes)
    ws.reserve()
    pool_of(ws).roomy = False
    assert _searches(ws, monkeypatch) == searches and ws.snapshot().growths == 0


def _searches(ws: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the provider is asked for bytes while two stages take turns four times, after a first one."""
    plain, found = Pooled._search, [0]

    def search(self: Pooled, *given: Any) -> Any:
        found[0] += 1
        return plain(self, *given)

    monkeypatch.setattr(Pooled, "_search", search)
    with torch.no_grad(), ws.on(ws.stream("main")):
        for turn in range(5):
            if turn == 1:
                found[0] = 0
            for layout, nbytes in ((BYTES, 40 * MIB), (OTHER, 30 * MIB)):
                with ws.lease(layout, N=nbytes):
                    pass
    return found[0]


@pytest.mark.parametrize(
    ("strategy", "together"), [("event_fenced", False), ("event_fenced", True), ("per_stream", False)]
)
def test_streams_that_take_turns_need_no_fence(strategy: str, together: bool) -> None:
    """After a first turn each has free blocks of its own, where the pool has room.

    Control: coalesced whoever used them, the bytes of both are one block, which each has to wait for.
    """
    device, ws = scene(strategy, reserve=1024 * MIB)
    pool_of(ws).roomy = False
    if together:
        pool_of(ws).by_streams = False
    streams = [ws.stream(f"micro_batch{part}") for part in range(2)]
    fences = []
    for _ in range(4):
        for layer in range(3):
            for stream in streams:
                with ws.on(stream), ws.lease(BYTES, N=(9 + layer) * MIB) as lease, ws.lease(OTHER, N=20 * MIB) as other:
                    device.launch("work", writes=[lease.x, other.y])
        fences.append(ws.snapshot().fences)
    assert (fences[-1] > fences[0]) is together
    assert device.verdict() == "SAFE" and ws.snapshot().growths == 0


@pytest.mark.parametrize("joined", [True, False])
def test_neighbours_of_several_streams_are_one_block_when_it_is_needed(joined: bool) -> None:
    """They are joined where none of them fits: without a fence if all are ordered, and before the pool grows."""
    device, ws = scene(reserve=30 * MIB)
    streams = [ws.stream(f"side{part}") for part in range(3)]
    with ws.fork(*streams) as branch:
        for stream in streams:
            with branch(stream):
                write(device, ws, "part", 10 * MIB, stream)
    assert [len(one.uses) for one in pool_of(ws).slabs[0].blocks()] == [1, 1, 1]
    with ws.on(streams[0] if not joined else ws.timeline.current()), ws.lease(BYTES, N=30 * MIB) as lease:
        device.launch("all", writes=[lease.x])
    found = ws.snapshot()
    assert (found.fences, found.growths) == (0 if joined else 2, 0) and device.verdict() == "SAFE"


@pytest.mark.parametrize("lock", [True, False])
def test_a_locked_pool_is_not_divided_by_streams(lock: bool) -> None:
    """It fences where bytes in pieces would have to be refused later. Control: one that may grow."""
    device, ws = scene(reserve=30 * MIB)
    pool = pool_of(ws)

    def pieces() -> int:
        for name in ("main", "other"):
            write(device, ws, "part", 10 * MIB, ws.stream(name))
        pool.consolidate()
        (run,) = pool.runs()
        return len(run)

    assert pieces() == 2
    if lock:
        ws.lock()
        assert len(pool.runs()[0]) == 1
    assert pieces() == (1 if lock else 2)
    ws.unlock()
    assert pool.by_streams and device.verdict() == "SAFE"


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("together", [True, False])
def test_a_footprint_takes_neighbours_of_several_streams(
    strategy: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a lane's first lease, and for those of larger buckets that follow. Control: it takes single blocks."""
    if not together:
        runs = Pool.runs
        monkeypatch.setattr(Pool, "runs", lambda pool, *usable: [[one] for run in runs(pool, *usable) for one in run])
    device, ws = scene(strategy, reserve=128 * MIB)
    parts = [ws.acquire(BYTES, N=nbytes * MIB, stream=ws.stream(str(nbytes))) for nbytes in (48, 60, 20)]
    for one in parts:
        device.launch("eager", writes=[one.x], stream=one.stream.key)
        one.release()
    ws.synchronize()
    refusal = pytest.raises(CaptureError, match="no block of the pool is large enough")
    captures = []
    with ws.on(ws.stream("main")), nullcontext() if together else refusal:
        for nbytes in (8, 50, 96, 120):
            captures.append(ws.capture())
            with captures[-1], ws.lease(BYTES, N=nbytes * MIB) as lease:
                device.launch("captured", writes=[lease.x])
        assert ws.snapshot().footprints == {"main": 120 * MIB}
    assert device.verdict() == "SAFE"


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize(("two_ends", "growths"), [(True, 0), (False, 1)], ids=["", "control"])
def test_the_largest_leases_leave_one_piece(strategy: str, two_ends: bool, growths: int) -> None:
    """They are cut from the other end than what lives beside them. Control: all from one end."""
    _, ws = scene(strategy, steady=True, reserve=96 * MIB)
    pool_of(ws).roomy = False
    if not two_ends:
        pool_of(ws).two_ends = False
    early, large, late = (ws.acquire(BYTES, N=nbytes * MIB) for nbytes in (9, 50, 9))
    early.release()
    large.release()
    with ws.lease(BYTES, N=70 * MIB):
        assert ws.snapshot().growths == growths and not late.released


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize(
    ("spare", "held", "searches"), [(30, 70, 0), (29, 40, 8), (0, 40, 8)], ids=["enough", "too little", "none"]
)
def test_spare_bytes_let_every_block_stay_uncut(
    strategy: str, spare: int, held: int, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two phases side by side: their leases take turns without a search. Control: in the bytes of the larger one."""
    device = Device()
    ws = workspace.create(strategy, device=device, granularity=MIB, statistics=False)
    for layout, nbytes in ((BYTES, 40 * MIB), (OTHER, 30 * MIB)):
        ws.declare(layout, phase=layout.name, N=nbytes)
    assert ws.reserve(spare=spare * MIB) == held * MIB == ws.snapshot().reserved
    ws.lock()
    assert _searches(ws, monkeypatch) == searches and ws.snapshot().growths == 0


@pytest.mark.parametrize(("capacity", "held"), [(None, 70), (70, 70), (69, 40)])
def test_spare_bytes_stay_within_the_capacity(capacity: int | None, held: int) -> None:
    ws = workspace.create("event_fenced", device=Device(), granularity=MIB, capacity=capacity and capacity * MIB)
    for layout, nbytes in ((BYTES, 40 * MIB), (OTHER, 30 * MIB)):
        ws.declare(layout, phase=layout.name, N=nbytes)
    assert ws.reserve(spare=1 << 40) == held * MIB


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_roomy_pool_gives_up_what_waits_before_it_refuses(strategy: str) -> None:
    """Other sizes than those that were declared: what waits for its like is cut after all."""
    ws = workspace.create(strategy, device=Device(), granularity=MIB, statistics=False)
    for layout, nbytes in ((BYTES, 40 * MIB), (OTHER, 30 * MIB)):
        ws.declare(layout, phase=layout.name, N=nbytes)
    ws.reserve(spare=30 * MIB)
    ws.lock()
    with torch.no_grad(), ws.on(ws.stream("main")):
        for nbytes in (40, 30, 20, 10, 5, 65):
            with ws.lease(BYTES, N=nbytes * MIB):
                pass
    check_books(ws)


@pytest.mark.parametrize(("micro_batches", "held"), [(1, 100), (2, 170)])
def test_what_lies_side_by_side(micro_batches: int, held: int) -> None:
    """Each layout once a lane, and once an eager micro-batch; the larger bound of one that is declared twice."""
    ws = workspace.create("event_fenced", device=Device(), granularity=MIB, micro_batches=micro_batches)
    for phase in ("a", "b"):
        ws.declare(BYTES, phase=phase, N=40 * MIB)
    ws.declare(OTHER, phase="b", N=30 * MIB)
    ws.declare(OTHER, lane="decode", N=30 * MIB)
    assert ws.reserve() == (70 * micro_batches + 30) * MIB == held * MIB
    assert ws.strategy_object.pool.roomy  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("settled", [True, False])
def test_streams_that_are_gone_leave_little_behind(
    strategy: str, settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One raw stream a request, destroyed after it: each would know all before. Control: the clocks keep it."""
    if not settled:
        monkeypatch.setattr(Clocks, "settle", lambda clocks: None)
    device, ws = scene(strategy, steady=True)
    for _ in range(5):
        for _ in range(20):
            raw = device.new_raw_stream("request")
            with ws.on(raw), ws.lease(BYTES, N=MIB) as lease:
                device.launch("work", writes=[lease.x])
            device.destroy_stream(raw)
        ws.synchronize()
    known = max(len(clock.seen) for clock in ws.timeline.clocks.of.values())
    assert len(pool_of(ws).free) <= 2 and device.verdict() == "SAFE"
    assert (known <= 1) is settled
