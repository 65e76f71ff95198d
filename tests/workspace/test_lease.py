"""Leases: from acquire to release, and everything that is refused around them."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workspace.scene import BYTES, MIB, SLAB, host, scene, write
from workspace import Layout, Workspace, spec
from workspace.errors import (
    CaptureError,
    GradModeError,
    LateUse,
    LayoutError,
    LeaseError,
    LeaseReleased,
    StreamError,
    WorkspaceError,
)
from workspace.simulated import Device

PAIR = Layout("pair", q=spec("T", 4, dtype=torch.float32), idx=spec("T", dtype=torch.int32))
SAFE = ["caching", "event_fenced", "per_stream"]
BLOCKS = ["event_fenced", "per_stream"]


@pytest.mark.parametrize("strategy", SAFE)
def test_a_lease_lends_the_layouts_tensors(strategy: str) -> None:
    """Shapes and dtypes are the layout's, contents are the caller's, and every tensor is writable on its own."""
    _, ws = host(strategy)
    with ws.lease(PAIR, T=3) as lease:
        lease.q.fill_(7)
        lease.idx.fill_(5)
        assert tuple(lease.q.shape) == (3, 4) and lease.q.dtype == torch.float32
        assert lease.q.sum() == 84 and lease.idx.sum() == 15
        assert lease.tensors.keys() == {"q", "idx"}
        assert lease.owner == "pair" and lease.nbytes == PAIR.size(T=3)


@pytest.mark.parametrize("strategy", BLOCKS)
def test_each_tensor_has_a_storage_of_its_own(strategy: str) -> None:
    """Autograd and AOTAutograd see no aliases: a storage ends where its tensor ends."""
    _, ws = host(strategy)
    with ws.lease(PAIR, T=3) as lease:
        assert lease.q.untyped_storage().nbytes() == 48
        assert lease.idx.untyped_storage().nbytes() == 12
        assert lease.q.data_ptr() % 256 == lease.idx.data_ptr() % 256 == 0
        assert lease.address == lease.q.data_ptr()


@pytest.mark.parametrize("strategy", BLOCKS)
def test_alignment_holds_in_a_crowded_slab(strategy: str) -> None:
    """An alignment above that of blocks is met wherever the block lies."""
    wide = Layout("wide", x=spec(100, dtype=torch.uint8, align=8192))
    _, ws = scene(strategy)
    held = []
    for count in (1, 300, 5):
        held += [ws.acquire(BYTES, N=count), ws.acquire(wide)]
    assert {one.x.data_ptr() % 8192 for one in held[1::2]} == {0}
    ranges = sorted((one.x.data_ptr(), one.x.nbytes) for one in held)
    assert all(start + nbytes <= after for (start, nbytes), (after, _) in zip(ranges, ranges[1:], strict=False))


@pytest.mark.parametrize("strategy", BLOCKS)
def test_repeated_leases_reuse_bytes_and_tensors(strategy: str) -> None:
    """The second lease of a layout on a stream gets the same block and the same tensor objects."""
    _, ws = host(strategy)
    with ws.lease(PAIR, T=3) as lease:
        first = lease.q
    with ws.lease(PAIR, T=3) as lease:
        assert lease.q is first


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_steady_lease_makes_no_device_call(strategy: str) -> None:
    """From the second lease on, nothing is recorded, waited for, allocated or asked."""
    device, ws = scene(strategy, steady=True)
    with ws.lease(BYTES, N=4096):
        pass
    before = device.counters.copy()
    for _ in range(100):
        with ws.lease(BYTES, N=4096):
            pass
    assert device.counters == before


@pytest.mark.parametrize("strategy", SAFE)
def test_a_tensor_of_a_released_lease_is_refused(strategy: str) -> None:
    """Reading by name after the release names the lease and the tensor."""
    _, ws = host(strategy)
    with ws.lease(PAIR, T=3) as lease:
        pass
    assert lease.released
    for read in (lambda: lease.q, lambda: lease.address, lambda: lease.tensors, lambda: lease.until(None)):
        with pytest.raises(LeaseReleased, match="pair"):
            read()


def test_a_lease_is_read_only_after_its_acquire() -> None:
    """Before the acquire there are no bytes."""
    _, ws = scene()
    with pytest.raises(LeaseReleased, match="before the acquire"):
        _ = ws.lease(PAIR, T=1).q


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("steady", [False, True])
def test_a_lease_is_released_once(strategy: str, steady: bool) -> None:
    """The second release is refused and gives nothing back twice."""
    _, ws = scene(strategy, steady=steady)
    for _ in range(2):
        lease = ws.acquire(BYTES, N=100)
        lease.release()
        with pytest.raises(LeaseReleased, match="released twice"):
            lease.release()
    one, other = ws.acquire(BYTES, N=100), ws.acquire(BYTES, N=100)
    if strategy != "caching":
        assert one.address != other.address


def test_a_release_inside_with_is_final() -> None:
    """Leaving the block after a release by hand does nothing."""
    _, ws = scene()
    with ws.lease(BYTES, N=100) as lease:
        lease.release()
    assert ws.snapshot().allocated == 0


@pytest.mark.parametrize("steady", [False, True])
def test_a_lease_is_acquired_once_at_a_time(steady: bool) -> None:
    """Entering a held lease is refused; after its release it may be entered again."""
    _, ws = scene(steady=steady)
    lease = ws.lease(BYTES, N=100)
    for _ in range(3):
        with lease:
            with pytest.raises(LeaseError, match="acquired twice"):
                lease.__enter__()
    assert lease.released


@pytest.mark.parametrize("steady", [False, True])
def test_a_lease_entered_again_belongs_to_the_stream_of_its_last_acquire(steady: bool) -> None:
    """Its use is stamped there, and not where it was held before."""
    device, ws = scene(steady=steady)
    first, second = ws.stream("first"), ws.stream("second")
    lease = ws.lease(BYTES, N=1024)
    with ws.on(first), lease:
        device.launch("one", writes=[lease.x])
    write(device, ws, "other", 1024, second)
    with ws.on(second):
        lease.__enter__()
        assert lease.stream is second
        device.launch("two", writes=[lease.x])
        lease.release()
    with ws.on(first), ws.lease(BYTES, N=1024) as one, ws.lease(BYTES, N=1024) as two:
        device.launch("three", writes=[one.x, two.x])
    assert device.verdict() == "SAFE"


def test_an_exception_releases() -> None:
    """The bytes come back and the exception arrives."""
    _, ws = scene()
    with pytest.raises(KeyError), ws.lease(BYTES, N=100):
        raise KeyError
    assert ws.snapshot().allocated == 0 and not ws.timeline.state.held


def test_an_unknown_tensor_is_an_attribute_error_that_lists_the_known() -> None:
    """`hasattr` works, and a typo shows what there is."""
    _, ws = scene()
    with ws.lease(PAIR, T=1) as lease:
        assert not hasattr(lease, "r") and not hasattr(lease, "__array__")
        with pytest.raises(AttributeError, match="it has: q, idx"):
            _ = lease.r


@pytest.mark.parametrize("name", "abcde")
def test_an_operator_in_place_on_a_tensor_of_a_lease(name: str) -> None:
    """``lease.x += 1`` assigns what it got back, whichever tensor of the layout it is."""
    _, ws = host()
    five = Layout("five", **dict.fromkeys("abcde", spec(4, dtype=torch.uint8)))  # type: ignore[arg-type]
    for _ in range(2):
        with ws.lease(five) as lease:
            getattr(lease, name).zero_()
            exec(f"lease.{name} += 3", {"lease": lease})
            assert getattr(lease, name).tolist() == [3, 3, 3, 3]


# -- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda ws: ws.lease(BYTES, stream=None, N=1),
        lambda ws: ws.acquire(BYTES, stream=None, N=1),
        lambda ws: ws.on(None),
        lambda ws: ws.fork(None),
        lambda ws: ws.synchronize(None),
        lambda ws: ws.event().record(None),
        lambda ws: ws.acquire(BYTES, N=1).use(None),
        lambda ws: ws.use(ws.acquire(BYTES, N=1).x, None),
    ],
)
def test_no_stream_is_not_the_current_stream(call: Callable[[Workspace], object]) -> None:
    """An omitted stream means the caller's current one; an explicit None is a bug of the caller (rmm#649)."""
    _, ws = scene()
    with pytest.raises(StreamError, match=r"None"):
        call(ws)


@pytest.mark.parametrize("stream", ["main", 1.5, True, object(), 999, -3])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    """Whatever is passed, the error is the library's, and nothing is held."""
    _, ws = scene()
    with pytest.raises(StreamError):
        ws.acquire(BYTES, stream=stream, N=1)
    assert ws.snapshot().allocated == 0 and not ws.timeline.state.held


def test_a_stream_of_another_device_is_refused() -> None:
    """Also where a stream of the same key exists here."""
    _, here = scene()
    _, there = scene()
    here.stream("mine")
    with pytest.raises(StreamError, match="another device"):
        here.acquire(BYTES, stream=there.stream("theirs"), N=1)
    with pytest.raises(StreamError, match="another device"):
        here.on(there.stream("theirs"))


def test_a_lease_on_a_named_stream_is_ordered_there() -> None:
    """``stream=`` decides whose next work gets the bytes, whatever stream is current."""
    device, ws = scene()
    aux = ws.stream("aux")
    write(device, ws, "main", SLAB, 0)
    lease = ws.acquire(BYTES, stream=aux, N=SLAB)
    with ws.on(aux):
        device.launch("aux", writes=[lease.x])
    lease.release()
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 1


def test_a_destroyed_raw_stream_is_refused_and_its_handle_is_another_stream() -> None:
    """A handle that comes again is a new stream, which nothing orders after the old one's uses (rmm#649)."""
    device, ws = scene()
    handle = device.new_raw_stream()
    with ws.on(handle), ws.lease(BYTES, N=SLAB) as lease:
        device.launch("old", reads=[lease.x])
    device.destroy_stream(handle)
    with pytest.raises(StreamError):
        ws.acquire(BYTES, stream=handle, N=SLAB)
    assert device.new_raw_stream() == handle
    with ws.on(handle), ws.lease(BYTES, N=SLAB) as lease:
        device.launch("new", writes=[lease.x])
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 1


# -- declared uses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("declared", [True, False])
def test_a_declared_use_is_ordered(strategy: str, declared: bool) -> None:
    """The next owner waits for the reader; without the declaration it does not, and the judge says so."""
    device, ws = scene(strategy)
    aux = ws.stream("aux")
    lease = ws.acquire(BYTES, N=SLAB)
    tensor = lease.x.tensor() if strategy == "caching" else lease.x
    device.launch("fill", writes=[tensor])
    ready = ws.event()
    ready.record()
    ready.wait(aux)
    device.launch("read", reads=[tensor], stream=aux.key)
    if declared:
        lease.use(aux)
    lease.release()
    del tensor
    gc.collect()
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("overwrite", writes=[lease.x])
    assert device.verdict() == ("SAFE" if declared else "UNSAFE")


def test_a_use_by_hand_outlasts_a_fork() -> None:
    """A join ends the branch's use, not the one the user declared for the same stream."""
    for acquirer in ("main", "other"):
        device, ws = scene()
        aux, other = ws.stream("aux"), ws.stream("other")
        lease = ws.acquire(BYTES, stream=other if acquirer == "other" else 0, N=SLAB)
        ws.use(lease, aux)
        with ws.fork(aux):
            pass
        device.launch("late read", reads=[lease.x], stream=aux.key)
        lease.release()
        with ws.on(lease.stream), ws.lease(BYTES, N=SLAB) as lease:
            device.launch("write", writes=[lease.x])
        assert device.verdict() == "SAFE", acquirer


def test_a_late_use_is_refused() -> None:
    """After the release others may own the bytes: by lease and by tensor."""
    _, ws = scene()
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=100) as lease:
        tensor = lease.x
    with pytest.raises(LateUse, match="after its release"):
        lease.use(aux)
    with pytest.raises(LateUse, match="no live lease"):
        ws.use(tensor, aux)
    with pytest.raises(LateUse, match="before the release"):
        ws.until(object())


@pytest.mark.parametrize("strategy", SAFE)
def test_a_use_is_declared_by_lease_tensor_or_view(strategy: str) -> None:
    """Whatever lies in the lease's bytes names the lease."""
    _, ws = host(strategy)
    aux = ws.stream("aux")
    with ws.lease(PAIR, T=4) as lease:
        whole = lease.q.tensor() if strategy == "caching" else lease.q
        for one in (lease, lease.q, whole[1:], whole.view(16)):
            ws.use(one, aux)


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("place", [scene, host])
def test_an_empty_tensor_may_be_declared_used(place: Callable[..., tuple[Device, Workspace]], strategy: str) -> None:
    """It has no bytes that anybody could overwrite, and model code does not test for it."""
    _, ws = place(strategy)
    with ws.lease(PAIR, T=0) as lease:
        ws.use(lease.q, ws.stream("aux"))


def test_declared_uses_across_a_capture_are_refused() -> None:
    """An eager lease is not used in a capture it was not held for, nor a captured one outside."""
    _, ws = scene(reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main):
        with ws.capture():
            with ws.lease(BYTES, N=100) as inside, pytest.raises(CaptureError, match="is used on"):
                inside.use(aux)
            with ws.on(aux):
                outside = ws.acquire(BYTES, N=100)
            with pytest.raises(CaptureError, match="lease it before the capture begins, or inside it"):
                outside.use(main)
    outside.release()


class Work:
    """A collective's handle: what follows ``wait`` on a stream comes after it."""

    def __init__(self, device: Device, ws: Workspace, tensor: Any) -> None:
        self._device = device
        self._done = ws.event()
        with ws.on(ws.stream("nccl", communication=True)):
            device.launch("reduce", writes=[tensor])
            self._done.record()

    def wait(self) -> None:
        self._done.wait()


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("waited", [True, False])
def test_a_lease_outlives_its_collective(strategy: str, waited: bool) -> None:
    """``ws.until(work)`` releases only after ``work.wait()`` on the acquiring stream (pytorch#148590)."""
    device, ws = scene(strategy)
    nccl = ws.stream("nccl", communication=True)
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("fill", writes=[lease.x])
        ready = ws.event()
        ready.record()
        ready.wait(nccl)
        work = Work(device, ws, lease.x)
        if waited:
            ws.until(work)
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("next", writes=[lease.x])
    assert device.verdict() == ("SAFE" if waited else "UNSAFE")


@pytest.mark.parametrize("strict", [True, False])
def test_strict_streams_count_every_stream_seen(strict: bool) -> None:
    """The setting orders the next owner after streams nobody declared."""
    device, ws = scene(strict_streams=strict)
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("undeclared", writes=[lease.x], stream=aux.key)
    write(device, ws, "next", SLAB, 0)
    assert device.verdict() == ("SAFE" if strict else "UNSAFE")


@pytest.mark.xfail(strict=True, reason="a single tensor's last uses are those of its stream and of declarations")
def test_strict_streams_count_for_single_tensors() -> None:
    """They are scratch as any other."""
    device, ws = scene(strict_streams=True)
    tensor = ws.empty((SLAB,), torch.uint8)
    device.launch("undeclared", writes=[tensor], stream=ws.stream("aux").key)
    del tensor
    gc.collect()
    write(device, ws, "next", SLAB, 0)
    assert device.verdict() == "SAFE"


@pytest.mark.xfail(strict=True, reason="the streams seen are those outside, which a captured lease ignores")
def test_strict_streams_count_inside_a_capture() -> None:
    """Every stream of the capture is a user of its leases."""
    device, ws = scene(strict_streams=True, reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture, ws.fork(aux) as branch:
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("write", writes=[lease.x])
            ready = ws.event()
            ready.record()
            ready.wait(aux)
            with branch(aux):
                device.launch("undeclared", reads=[lease.x])
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("next", writes=[lease.x])
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"


# -- modes, copies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SAFE)
def test_autograd_is_refused_unless_allowed(strategy: str) -> None:
    """A saved tensor over scratch would be overwritten: refused on the steady path too."""
    _, ws = host(strategy)
    with ws.lease(BYTES, N=4):
        pass
    with torch.enable_grad():
        for ask in (lambda: ws.acquire(BYTES, N=4), lambda: ws.empty((4,), torch.float32)):
            with pytest.raises(GradModeError, match="autograd records"):
                ask()
    assert not ws.timeline.state.held
    _, allowing = host(strategy, allow_grad=True)
    with torch.enable_grad(), allowing.lease(BYTES, N=4) as lease:
        assert lease.x.shape == (4,)


@pytest.mark.parametrize("strategy", BLOCKS)
def test_tensors_made_in_inference_mode_are_usable_outside_it(strategy: str) -> None:
    """The cached tensors of a block serve both modes."""
    _, ws = host(strategy)
    with torch.inference_mode(), ws.lease(PAIR, T=2) as lease:
        lease.q.fill_(1)
        assert not lease.q.is_inference()
    with ws.lease(PAIR, T=2) as lease:
        lease.q.add_(1)
        assert lease.q.sum() == 16


@pytest.mark.parametrize("strategy", SAFE)
def test_under_fake_tensors_a_lease_is_fake(strategy: str) -> None:
    """Tracing takes no bytes, and the tensors are fake ones of the right shape."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    _, ws = host(strategy)
    with FakeTensorMode():
        with ws.lease(PAIR, T=3) as lease:
            assert isinstance(lease.q, FakeTensor) and tuple(lease.q.shape) == (3, 4)
        assert lease.released
        assert isinstance(ws.empty((2,), torch.float32), FakeTensor)
        assert isinstance(ws.persistent("counters", (2,), torch.int32), FakeTensor)
    assert ws.snapshot().reserved == 0
    with ws.lease(PAIR, T=3) as lease:
        assert not isinstance(lease.q, FakeTensor)
    assert not isinstance(ws.persistent("counters", (2,), torch.int32), FakeTensor)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_lease_is_not_copied(copied: Callable[[Any], object]) -> None:
    """Two leases over the same bytes would be released twice."""
    _, ws = scene()
    with ws.lease(BYTES, N=1) as lease, pytest.raises(LeaseError, match="copy its tensors"):
        copied(lease)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_workspace_is_not_copied(copied: Callable[[Any], object]) -> None:
    """The remedy names what may be sent instead."""
    _, ws = scene()
    with pytest.raises(WorkspaceError, match=r"workspace\.Handle"):
        copied(ws)


@pytest.mark.parametrize("strategy", SAFE)
def test_empty_leases_need_no_bytes(strategy: str) -> None:
    """A zero-size request works locked, in a capture, and on an empty pool, and adds no slab."""
    _, ws = scene(strategy)
    ws.lock()
    with ws.lease(PAIR, T=0) as lease, ws.lease(PAIR, T=0):
        assert tuple(lease.q.shape) == (0, 4)
    with ws.on(ws.stream("main")), ws.capture(), ws.lease(PAIR, T=0) as lease:
        assert tuple(lease.q.shape) == (0, 4)
    assert ws.empty((0, 3), torch.int64).shape == (0, 3)
    assert ws.snapshot().slabs == ()


@pytest.mark.parametrize("dims", [{}, {"N": -1}, {"M": 1}, {"N": 2**63}, {"N": "1"}, {"N": [1]}])
def test_bad_dims_leave_nothing_behind(dims: dict[str, Any]) -> None:
    """The error is a layout's, and the next lease is served."""
    _, ws = scene()
    with pytest.raises(LayoutError):
        ws.acquire(BYTES, **dims)
    assert ws.snapshot().allocated == 0
    write(Device(memory="virtual"), ws, "unjudged", 1, 0)


@pytest.mark.parametrize("nbytes", [2**31, 70_000 * 40_000, 2**40])
def test_leases_beyond_32_bits(nbytes: int) -> None:
    """The last byte is inside the slab."""
    device, ws = scene()
    with ws.lease(BYTES, N=nbytes) as lease:
        last = lease.x.data_ptr() + nbytes - 1
        assert device.memory.segment_of(last) is not None
        device.launch("last byte", writes=[(last, 1)])


def test_zero_fills_on_the_acquiring_stream() -> None:
    """``zero=True`` is a memset there, on every acquire, over the payload only."""
    device, ws = host()
    with ws.lease(BYTES, N=8, zero=True) as lease:
        lease.x.fill_(9)
    with ws.lease(BYTES, N=8, zero=True) as lease:
        assert lease.x.sum() == 0
    assert device.counters["memset"] == 2


@pytest.mark.parametrize("strategy", BLOCKS)
def test_two_leases_of_one_layout_are_apart(strategy: str) -> None:
    """Held at once, they share no byte, also on the steady path."""
    _, ws = scene(strategy, steady=True)
    for _ in range(3):
        with ws.lease(BYTES, N=300) as one, ws.lease(BYTES, N=300) as other:
            assert abs(one.x.data_ptr() - other.x.data_ptr()) >= 300
