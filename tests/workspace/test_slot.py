"""Slots: tensors of a lease that exist once somebody fills or needs them."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, host, scene
from workspace import Layout, Slot, Workspace, spec
from workspace.errors import CapacityError, LayoutError, LeaseError, LeaseReleased, WorkspaceError
from workspace.lazy import LazyLease
from workspace.simulated import Device
from workspace.strategies.caching import CapturedCaching

INTEGERS = Layout("integers", x=spec(2, 2, dtype=torch.int64), y=spec(2, 2, dtype=torch.int64))
UNARY = [
    operator.neg, operator.pos, operator.invert, abs, list, np.array, torch.neg, torch.clone, lambda x: x.T.sum(),
]  # fmt: skip
BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.matmul, operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift, operator.lt,
    operator.le, operator.gt, operator.ge, operator.eq, operator.ne, torch.add, torch.maximum,
]  # fmt: skip
IN_PLACE = [operator.iadd, operator.isub, operator.imul, operator.ifloordiv, operator.imod, operator.ipow]


def fill(slot: Any, device: Device, ws: Workspace) -> None:
    """As an op's returning form does: a tensor of `SLAB` bytes, written on the current stream."""
    made = ws.driver.empty((SLAB,), torch.uint8, ws.driver.current_stream())
    device.launch("op", writes=[made])
    slot.fill(made)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(same(first, second) for first, second in zip(one, other, strict=True))
    return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))


@pytest.mark.parametrize("function", UNARY + BINARY + IN_PLACE, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_slot_computes_as_the_tensor_it_stands_for(function: Callable[..., Any]) -> None:
    """With slots, tensors and numbers on either side: model code does not know the difference."""
    _, ws = host("caching")
    with ws.lease(INTEGERS) as lease:
        x, y = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[3, 1], [2, 2]])
        lease.x.copy_(x), lease.y.copy_(y)
        fresh = ws.acquire(INTEGERS)
        fresh.x.copy_(x), fresh.y.copy_(y)
        assert isinstance(fresh._tensors, list)
        slot = Slot(lease, 0, INTEGERS.resolve().extents[0])
        slot.fill(x.clone())
        if function in UNARY:
            assert same(function(slot), function(x))
        else:
            assert same(function(slot, y), function(x.clone(), y))
            if function not in IN_PLACE:
                assert same(function(y, slot), function(y, x))
            if function is not operator.matmul and function is not torch.maximum:
                slot.fill(x.clone())
                assert same(function(slot, 2), function(x.clone(), 2))
        fresh.release()


@pytest.mark.parametrize("kind", [torch.int64, torch.bool], ids=["indices", "mask"])
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_slot_indexes_as_the_tensor_it_stands_for(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, has_length: bool
) -> None:
    """At any length, alone or in a tuple. Control: with ``len()``, torch takes a short one for a tuple of indices."""
    if has_length:
        monkeypatch.setattr(Slot, "__len__", lambda slot: slot.shape[0], raising=False)
    layout: Any = Layout("index", o=spec("T", dtype=kind))
    _, ws = host("caching")
    wrong = 0
    for tokens in (1, 2, 3, 31, 32, 40):
        table = torch.arange(float(tokens * 6)).view(tokens, 2, 3)
        with ws.lease(layout, T=tokens) as lease:
            slot = lease.o
            slot.copy_(torch.arange(tokens).flip(0) if kind is torch.int64 else torch.arange(tokens) % 2 == 0)
            for read in (operator.getitem, first_of, set_to_zero):
                try:
                    wrong += not same(read(table, slot), read(table, slot.tensor()))
                except IndexError:
                    wrong += 1
    assert (wrong > 0) is has_length
    if not has_length:
        with ws.lease(layout, T=2) as lease, pytest.raises(TypeError, match="no len"):
            len(lease.o)


def first_of(table: Any, index: Any) -> Any:
    return table[index, 0]


def set_to_zero(table: Any, index: Any) -> Any:
    copied = table.clone()
    copied[index] = 0.0
    return copied


def test_a_slot_is_empty_until_it_is_used() -> None:
    """Shape and dtype are known, bytes are not taken; the first use allocates, once."""
    device, ws = host("caching")
    with ws.lease(INTEGERS) as lease:
        slot = lease.x
        assert isinstance(slot, Slot) and slot.shape == (2, 2) and slot.dtype == torch.int64
        assert "x" in repr(slot) and ws.snapshot().allocated == 0
        slot[0, 0] = 7
        assert slot[0, 0] == 7 and lease.x is slot.tensor() and ws.snapshot().allocated == 32
    assert ws.snapshot().allocated == 0 and device.counters["alloc"] == 1


def test_a_returning_form_fills_a_slot() -> None:
    """The op's own tensor is the slot's content from then on, and nothing else is allocated."""
    device, ws = host("caching")
    with ws.lease(INTEGERS) as lease:
        made = torch.ones(2, 2, dtype=torch.int64)
        assert lease.x.fill(made) is made and lease.x is made
        assert ws.snapshot().allocated == 32 and device.counters["alloc"] == 0


def test_a_slot_is_an_out_argument() -> None:
    """Of torch functions, by keyword and nested in a list."""
    _, ws = host("caching")
    with ws.lease(INTEGERS) as lease:
        out = lease.x
        torch.add(torch.ones(2, 2, dtype=torch.int64), 1, out=out)
        assert out.tensor().eq(2).all()
        assert torch.cat([lease.x, out, out]).shape == (6, 2)


@pytest.mark.parametrize("wrong", [torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 2)], ids=["shape", "dtype"])
def test_what_fills_a_slot_is_what_the_layout_says(wrong: torch.Tensor) -> None:
    """Another shape or dtype is refused with both named, and the slot stays empty."""
    _, ws = host("caching")
    with ws.lease(INTEGERS) as lease:
        with pytest.raises(LayoutError, match="slot x of integers"):
            lease.x.fill(wrong)
        assert isinstance(lease.x, Slot)


def test_a_slot_ends_with_its_lease() -> None:
    """Kept beyond the release it gives nothing, filled or not."""
    _, ws = host("caching")
    with ws.lease(INTEGERS) as lease:
        slot = lease.x
    for use in (slot.tensor, lambda: slot.fill(torch.ones(2, 2, dtype=torch.int64)), lambda: slot + 1):
        with pytest.raises(LeaseReleased):
            use()


def test_a_filled_slot_ends_with_its_lease_too() -> None:
    """Its bytes are the allocator's again."""
    _, ws = host("caching")
    with ws.lease(INTEGERS) as lease:
        slot = lease.x
        slot.tensor()
    with pytest.raises(LeaseReleased):
        slot.tensor()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_slot_is_not_copied(copied: Callable[[Any], object]) -> None:
    """It is part of its lease."""
    _, ws = host("caching")
    with ws.lease(INTEGERS) as lease, pytest.raises(LeaseError, match="copy its tensors"):
        copied(lease.x)


def test_slots_are_keys() -> None:
    """Comparison is the tensor's, identity is the slot's."""
    _, ws = host("caching")
    with ws.lease(INTEGERS) as lease:
        assert len({lease.x: 1, lease.y: 2}) == 2


# -- caching: who is told what -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["caching", "upstream"])
def test_a_slot_filled_in_a_branch_is_ordered_before_its_reuse_there(strategy: str) -> None:
    """It is allocated on the branch's stream, where it goes back to: that stream waits for the parent's read."""
    device, ws = scene(strategy, allow_unsafe=True)
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=SLAB) as lease:
        with ws.fork(aux) as branch, branch(aux):
            device.launch("fill", writes=[lease.x])
        device.launch("read", reads=[lease.x])
    del lease
    gc.collect()
    with ws.on(aux), ws.lease(BYTES, N=SLAB) as lease:
        device.launch("next", writes=[lease.x])
    assert device.verdict() == ("SAFE" if strategy == "caching" else "UNSAFE")


def test_the_allocator_is_told_only_of_uses_that_nothing_orders() -> None:
    """After a join the home stream comes after the branch."""
    device, ws = scene("caching")
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("fill", writes=[lease.x])
        with ws.fork(aux) as branch, branch(aux):
            device.launch("read", reads=[lease.x])
    assert device.counters["record_stream"] == 0
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("fill", writes=[lease.x])
        lease.use(aux)
    assert device.counters["record_stream"] == 1 and device.verdict() == "SAFE"


@pytest.mark.parametrize("waits", [True, False])
def test_in_a_capture_a_tensor_is_kept_until_the_join(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """A branch still reads it: the next tensor lies elsewhere; after the join the bytes are used again."""
    if not waits:
        monkeypatch.setattr(CapturedCaching, "unordered", lambda caching, home, uses: [])
    device, ws = scene("caching")
    main, aux = ws.stream("main"), ws.stream("aux")

    def one_layer() -> None:
        with ws.fork(aux) as branch:
            with ws.lease(BYTES, N=16 * MIB) as lease:
                device.launch("fill", writes=[lease.x])
                out = ws.event()
                out.record()
                out.wait(aux)
                lease.use(aux)
                with branch(aux):
                    device.launch("read", reads=[lease.x])
            del lease
            gc.collect()
            with ws.lease(BYTES, N=16 * MIB) as lease:
                device.launch("next", writes=[lease.x])

    with ws.on(main), ws.capture() as capture:
        for _ in range(5):
            one_layer()
    capture.graph.replay(main)
    assert device.verdict() == ("SAFE" if waits else "UNSAFE")
    if waits:
        assert device.memory.used <= 4 * 16 * MIB  # each layer's two tensors, and what the fork before still held


# -- several at once -----------------------------------------------------------------------------------------------
PAIR = Layout("pair", x=spec(4, dtype=torch.uint8), y=spec(2, dtype=torch.uint8), z=spec(0, dtype=torch.uint8))


@pytest.mark.parametrize("strategy", ["caching", "upstream", "event_fenced"])
def test_allocate_makes_what_is_missing_and_returns_what_is_there(strategy: str) -> None:
    _, ws = host(strategy, allow_unsafe=True)
    with ws.lease(PAIR) as lease:
        slot = lease.x
        (y,) = lease.allocate("y")
        assert y is lease.y
        x, again, z = lease.allocate()
        assert again is y and x is lease.x and z.numel() == 0
        assert slot is x or slot.tensor() is x
        assert [one is other for one, other in zip(lease.allocate("y", "x"), (y, x), strict=True)] == [True, True]
        assert ws.snapshot().allocated >= 6
    assert ws.snapshot().allocated == 0


@pytest.mark.parametrize("strategy", ["caching", "event_fenced"])
def test_allocate_refuses_unknown_names_and_a_released_lease(strategy: str) -> None:
    _, ws = host(strategy)
    with ws.lease(PAIR) as lease:
        with pytest.raises(AttributeError, match="has no tensor 'q'; it has: x, y, z"):
            lease.allocate("x", "q")
    with pytest.raises(LeaseReleased, match="after its release"):
        lease.allocate("x")


def test_what_cannot_be_allocated_leaves_the_rest_accounted() -> None:
    """The first of two tensors is there, counted, and comes back with the release."""
    device, ws = host("caching")
    made = []
    empty = ws.driver.empty

    def fails_second(*arguments: Any) -> Any:
        if made:
            raise MemoryError("full")
        made.append(empty(*arguments))
        return made[0]

    ws.driver.empty = fails_second  # type: ignore[method-assign]
    with ws.lease(PAIR) as lease:
        with pytest.raises(MemoryError):
            lease.allocate("x", "y")
        assert ws.snapshot().allocated == 4
        assert lease.x is made[0]
    assert ws.snapshot().allocated == 0


@pytest.mark.parametrize("strategy", ["caching", "upstream"])
def test_a_closed_workspace_lends_no_slots(strategy: str) -> None:
    _, ws = host(strategy, allow_unsafe=True)
    lease = ws.lease(PAIR)
    with lease:
        pass
    ws.close()
    with pytest.raises(WorkspaceError, match="is closed"):
        lease.__enter__()


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("captured", [False, True])
def test_what_a_slot_held_before_it_was_filled_again_is_read_to_the_end(
    captured: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch reads the first tensor still, when the second takes its place: nobody is given its bytes before.

    Control: dropped without a word at the second fill, they go to the next allocation of their stream.
    """
    if not kept:
        monkeypatch.setattr(LazyLease, "_replace", lambda lease, position: None)
    device, ws = scene("caching", steady=True)
    main, aux = ws.stream("main"), ws.stream("aux")

    def step() -> None:
        with ws.lease(BYTES, N=SLAB) as lease:
            slot = lease.x
            fill(slot, device, ws)
            with ws.fork(aux) as branch:
                with branch(aux):
                    device.launch("read", reads=[slot.tensor()])
                    fill(slot, device, ws)
                with ws.lease(OTHER, N=SLAB) as other:
                    device.launch("write", writes=[other.y.tensor()])
            device.launch("read", reads=[slot.tensor()])

    with ws.on(main):
        if captured:
            with ws.capture() as capture:
                step()
            capture.graph.replay()
        else:
            step()
    assert device.verdict() == ("SAFE" if kept else "UNSAFE")


@pytest.mark.parametrize("strategy", ["caching", "upstream"])
@pytest.mark.parametrize("statistics", [False, True])
def test_a_slot_that_is_filled_again_and_again_holds_one_tensor(strategy: str, statistics: bool) -> None:
    """As many times as a loop likes, also with the same one; each is counted once, and given back."""
    _, ws = host(strategy, allow_unsafe=True, statistics=statistics)
    with ws.lease(BYTES, N=512) as lease:
        slot = lease.x
        for _ in range(2000):
            made = torch.zeros(512, dtype=torch.uint8)
            slot.fill(made)
            slot.fill(made)
        assert ws.snapshot().allocated == 512 and len(lease._homes) == 1
        assert lease.covers(made.data_ptr(), made)
    assert ws.snapshot().allocated == 0


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["inside the capture", "after it"])
@pytest.mark.parametrize("released", [True, False])
def test_what_a_graph_reads_at_each_replay_stays_when_its_slot_is_filled_again(
    kept: bool, inside: bool, released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the graph is gone, also after the release; then it goes back, after the replays. The control drops it."""
    if not kept:
        monkeypatch.setattr(LazyLease, "_replace", lambda lease, position: lease._homes.pop(position))
    device, ws = scene("caching", steady=True)
    main, aux = ws.stream("main"), ws.stream("aux")

    with ws.on(main):
        lease = ws.acquire(BYTES, N=SLAB)
        slot = lease.x
        fill(slot, device, ws)
        with ws.capture() as capture:
            device.launch("graph reads", reads=[slot.tensor()])
            if inside:
                fill(slot, device, ws)
        if not inside:
            fill(slot, device, ws)
        if released:
            lease.release()
        other = ws.acquire(OTHER, N=SLAB)
        other.allocate()
        event = ws.event()
        event.record(main)
        event.wait(aux)
        capture.graph.replay(aux)
        device.launch("write", writes=[other.y])
        assert device.verdict() == ("SAFE" if kept else "UNSAFE")
        if kept:
            assert ws.snapshot().allocated == 3 * SLAB
            capture.graph.release()
            other.release()
            if not released:
                lease.release()
            assert ws.snapshot().allocated == 0
            for _ in range(3):
                device.launch("write", writes=ws.acquire(BYTES, N=SLAB).allocate())
            assert device.verdict() == "SAFE"


PARTS = Layout("parts", y=spec("N", dtype=torch.float32))


@pytest.mark.parametrize("touch", ["slot", "lease", "allocate", "by hand"])
@pytest.mark.parametrize("follows", [True, False])
def test_branches_that_share_a_tensor_come_after_what_its_bytes_were(
    touch: str, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator gives the branch that is first what it freed a moment ago; the other was forked before that.

    The control: without the wait the second branch races with the first one's earlier scratch.
    """
    if not follows:
        monkeypatch.setattr(LazyLease, "_follow", lambda lease, position, stream: None)
    device, ws = scene("caching", steady=True)
    main, one, two = ws.stream("main"), ws.stream("one"), ws.stream("two")

    def scratch() -> None:
        with ws.lease(OTHER, N=SLAB) as own:
            device.launch("scratch", writes=own.allocate("y"))

    def first(slot: Any) -> None:
        scratch()
        device.launch("a half", writes=[(ws.driver.address_of(slot.tensor()), SLAB // 2)])

    def second(lease: Any, slot: Any) -> None:
        tensor = {"slot": lambda: slot.tensor(), "lease": lambda: lease.x}.get(touch, lambda: lease.allocate("x")[0])()
        device.launch("the other", writes=[(ws.driver.address_of(tensor) + SLAB // 2, SLAB // 2)])

    with ws.on(main):
        with ws.lease(BYTES, N=SLAB) as lease:
            slot = lease.x
            if touch == "by hand":
                event = ws.event()
                event.record()
                event.wait(one)
                lease.use(one)
                with ws.on(one):
                    first(slot)
                second(lease, slot)
            else:
                with ws.fork(one, two) as branch:
                    with branch(one):
                        first(slot)
                    with branch(two):
                        second(lease, slot)
    assert device.verdict() == ("SAFE" if follows else "UNSAFE")
    assert ws.snapshot().fences == (1 if follows else 0)


def test_branches_with_tensors_of_their_own_wait_for_nobody() -> None:
    """No fence where each uses what it made, none for what was made before the fork, and none after the join."""
    device, ws = scene("caching", steady=True)
    one, two = ws.stream("one"), ws.stream("two")
    pair = Layout("pair", a=spec(SLAB, dtype=torch.uint8), b=spec(SLAB, dtype=torch.uint8))
    with ws.lease(BYTES, N=SLAB) as shared, ws.lease(pair) as lease:
        shared.allocate()
        with ws.fork(one, two) as branch:
            for stream, name in ((one, "a"), (two, "b")):
                with branch(stream):
                    for _ in range(2):
                        device.launch("own", writes=lease.allocate(name), reads=shared.allocate("x"))
        device.launch("joined", reads=[lease.a, lease.b, shared.x])
    assert ws.snapshot().fences == 0 and device.verdict() == "SAFE"


@pytest.mark.parametrize("strategy", ["caching", "event_fenced", "per_stream"])
def test_zeros_are_there_before_the_first_use(strategy: str) -> None:
    """Filled at the acquire, where it is acquired: a branch that adds to a half finds them, under every seed."""
    for seed in range(3):
        device = Device(execution="deferred", seed=seed)
        ws = workspace.create(strategy, device=device)
        one, two = ws.stream("one"), ws.stream("two")
        with torch.inference_mode(), device, ws.lease(PARTS, N=8192, zero=True) as lease:
            with ws.fork(one, two) as branch:
                with branch(one):
                    lease.y[:4096].add_(1.0)
                with branch(two):
                    lease.y[4096:].add_(2.0)
            assert lease.y.sum().item() == 3 * 4096
        assert device.verdict() == "SAFE"


def test_zeros_that_cannot_be_made_leave_nothing_behind() -> None:
    """The acquire fails, and the lease may be acquired when there is room."""
    device = Device(memory="virtual", capacity=40 * MIB)
    ws = workspace.create("caching", device=device)
    taken = device.malloc(30 * MIB)
    lease = ws.lease(BYTES, N=20 * MIB, zero=True)
    with pytest.raises(CapacityError):
        lease.__enter__()
    assert lease.released and ws.snapshot().allocated == 0 and not ws.timeline.state.held
    device.free(taken)
    with lease:
        assert ws.snapshot().allocated == 20 * MIB
    assert ws.snapshot().allocated == 0
