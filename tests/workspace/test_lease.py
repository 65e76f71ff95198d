"""Leases: from acquire to release, on which stream, and everything that is refused around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workspace.scene import BYTES, SLAB, host, scene, write
from workspace import Layout, Workspace, spec
from workspace.errors import (
    LeaseError,
    LeaseReleased,
    SizeError,
    StreamError,
)

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
    _, ws = scene(strategy, steady=True)
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


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("name", ["a", "c", "d"], ids=["first", "third", "fourth"])
def test_a_tensor_of_a_lease_is_not_replaced(strategy: str, steady: bool, name: str) -> None:
    """What an op returned is copied into it. An assignment is refused, at the latest when the lease ends.

    The bytes come back, and an error of the block's own is not hidden by it.
    """
    specs: Any = {one: spec(4, dtype=torch.float32) for one in "abcd"}
    four: Any = Layout("four", **specs)
    device, ws = host(strategy)
    device.driver().attributes = not steady
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(LeaseError, match=f"'{name}' of the lease of four cannot be replaced"):
                with ws.lease(four) as lease:
                    setattr(lease, name, torch.zeros(4))
            with pytest.raises(LeaseError, match=f"'{name}' of the lease of four cannot be replaced or deleted"):
                with ws.lease(four) as lease:
                    delattr(lease, name)
            if strategy == "caching":
                continue  # refused at once
            made: Any = ws.lease(four)
            with pytest.raises(ZeroDivisionError), made:
                made.a = torch.zeros(4)
                _ = 1 // 0
            made = ws.lease(four)
            with made:
                made.a += 1  # the in-place operator returns the tensor itself
            made = ws.lease(four)
            with pytest.raises(LeaseError), made:
                made.use(ws.stream("aux"))
                made.b = torch.zeros(4)
            made = ws.lease(four)
            with pytest.raises(LeaseError), made:
                made.use(ws.stream("aux"))
                del made.b
        assert ws.snapshot().allocated == 0


def test_a_lease_is_read_only_after_its_acquire() -> None:
    """Before the acquire there are no bytes."""
    _, ws = scene()
    with pytest.raises(LeaseReleased, match="before the acquire") as caught:
        _ = ws.lease(PAIR, T=1).q
    assert "`with ws.lease(...) as s:`" in caught.value.remedy


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


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("wrong", [2.0, True, "2", [2]])
def test_a_dim_is_an_integer_whatever_was_leased_before(strategy: str, wrong: object) -> None:
    """What equals a dim that is known is no dim for that: refused as often as it is passed, by lease as by acquire."""
    _, ws = scene(strategy, steady=True)
    for _ in range(3):
        for known in (1, 2):
            with pytest.raises(SizeError, match="is not an int"):
                ws.lease(BYTES, N=wrong)  # type: ignore[arg-type]
            with pytest.raises(SizeError, match="is not an int"):
                ws.acquire(BYTES, N=wrong)  # type: ignore[arg-type]
            with ws.lease(BYTES, N=known):
                pass
