"""Arguments that cannot be meant are typed errors that say what was passed; nothing has changed then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, MIB, host, scene, write
from workspace import Layout, Workspace, spec
from workspace.adaptors.trace import Trace
from workspace.errors import ArgumentError, ConfigError, DeviceError, LayoutError, LockError, TraceError, WorkspaceError
from workspace.simulated import Device

U8 = torch.uint8
Call = Callable[[Workspace], Any]


def _enter(ws: Workspace, **slot: Any) -> None:
    with ws.slot(**slot):
        pass


REFUSED: dict[str, tuple[Call, type[WorkspaceError], str]] = {
    "lease(None)": (lambda ws: ws.lease(None, N=1), LayoutError, "None is not a layout"),
    "lease('x')": (lambda ws: ws.lease("x", N=1), LayoutError, "'x' is not a layout"),
    "acquire(None)": (lambda ws: ws.acquire(None, N=1), LayoutError, "None is not a layout"),
    "declare('x')": (lambda ws: ws.declare("x", N=1), LayoutError, "'x' is not a layout"),
    "declare(count=-1)": (lambda ws: ws.declare(BYTES, N=1, count=-1), ArgumentError, "count=-1"),
    "declare(count=0)": (lambda ws: ws.declare(BYTES, N=1, count=0), ArgumentError, "at least 1"),
    "declare(count=1.5)": (lambda ws: ws.declare(BYTES, N=1, count=1.5), ArgumentError, "count=1.5"),
    "declare(count=True)": (lambda ws: ws.declare(BYTES, N=1, count=True), ArgumentError, "count=True"),
    "declare(lane=5)": (lambda ws: ws.declare(BYTES, N=1, lane=5), ArgumentError, "lane=5 is not a name"),
    "declare(lane='')": (lambda ws: ws.declare(BYTES, N=1, lane=""), ArgumentError, "lane='' is not a name"),
    "declare(phase=[])": (lambda ws: ws.declare(BYTES, N=1, phase=["x"]), ArgumentError, "phase="),
    "capture(['x'])": (lambda ws: ws.capture(["x"]), ArgumentError, r"lane=\['x'\] is not a name"),
    "slot(lane=['x'])": (lambda ws: _enter(ws, lane=["x"]), ArgumentError, "lane="),
    "slot(micro_batch='1')": (lambda ws: _enter(ws, micro_batch="1"), ArgumentError, "micro_batch='1'"),
    "slot(micro_batch=0.5)": (lambda ws: _enter(ws, micro_batch=0.5), ArgumentError, "micro_batch=0.5"),
    "slot(micro_batch=-1)": (lambda ws: _enter(ws, micro_batch=-1), ArgumentError, "micro_batch=-1"),
    "stream([1])": (lambda ws: ws.stream([1]), ArgumentError, r"stream=\[1\] is not a name"),
    "stream(None)": (lambda ws: ws.stream(None), ArgumentError, "stream=None"),
    "stream('')": (lambda ws: ws.stream(""), ArgumentError, "stream=''"),
    "empty(5)": (lambda ws: ws.empty(5, U8), LayoutError, "shape 5 is not a tuple"),
    "empty('5')": (lambda ws: ws.empty("5", U8), LayoutError, "shape '5'"),
    "empty(owner=[])": (lambda ws: ws.empty((5,), U8, owner=[]), ArgumentError, "owner="),
    "empty((5.0,))": (lambda ws: (ws.empty((5,), U8), ws.empty((5.0,), U8)), LayoutError, r"\(5.0,\) has a dim"),
    "empty((True,))": (lambda ws: (ws.empty((1,), U8), ws.empty((True,), U8)), LayoutError, "no integer"),
    "empty(([5],))": (lambda ws: ws.empty(([5],), U8), LayoutError, "no integer"),
    "empty(dtype=[])": (lambda ws: ws.empty((5,), []), LayoutError, "not a torch dtype"),
    "persistent(shape=5)": (lambda ws: ws.persistent("p", 5, U8), LayoutError, "shape 5"),
    "persistent([])": (lambda ws: ws.persistent([], (5,), U8), ArgumentError, "name="),
    "reserve(spare='1')": (lambda ws: ws.reserve(spare="1"), ArgumentError, "spare='1'"),
    "reserve(spare=None)": (lambda ws: ws.reserve(spare=None), ArgumentError, "spare=None"),
    "reserve(spare=-5)": (lambda ws: ws.reserve(spare=-5), ArgumentError, "at least 0"),
    "reserve(spare=1.5)": (lambda ws: ws.reserve(spare=1.5), ArgumentError, "spare=1.5"),
    "use(5)": (lambda ws: ws.use(5, ws.stream("aux")), ArgumentError, "a use of 5"),
    "until(5)": (lambda ws: ws.until(5), ArgumentError, r"5 has no wait\(\)"),
    "owner([])": (lambda ws: ws.owner(["x"]), ArgumentError, "owner="),
    "owner('')": (lambda ws: ws.owner(""), ArgumentError, "owner="),
    "retry_on_oom(None)": (lambda ws: ws.retry_on_oom(None), ArgumentError, "None cannot be called"),
    "explain('x')": (lambda ws: ws.explain("x"), ArgumentError, "count='x'"),
    "create(config={})": (lambda ws: workspace.create(config={}), ConfigError, r"config=\{\} is not a Work"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(call: str) -> None:
    """Value, rule and remedy; what the workspace holds, declares and lends is what it was."""
    made, error, says = REFUSED[call]
    _, ws = scene(reserve=MIB)
    before, declared = ws.snapshot(), ws.reservation.nbytes(micro_batches=1, headroom=1.0)
    with pytest.raises(error, match=says) as caught:
        made(ws)
    assert caught.value.remedy
    assert ws.snapshot() == before and ws.reservation.nbytes(micro_batches=1, headroom=1.0) == declared
    assert set(ws.children) == set() and not ws.timeline.state.held
    with ws.lease(BYTES, N=MIB):
        pass


@pytest.mark.parametrize("wrong", ["abc", None, [1, 2], 5, object()])
def test_only_tensors_are_uploaded_to(wrong: Any) -> None:
    """Refused by name; nothing is enqueued, and the slot serves on."""
    device, ws = host()
    with ws.staging("s", 64).fill() as slot:
        with pytest.raises(ArgumentError, match="an upload to"):
            slot.upload(wrong)
        with ws.lease(BYTES, N=64) as lease, pytest.raises(ArgumentError, match="an upload to <"):
            slot.upload(lease)
        assert device.counters["upload"] == 0
        with ws.lease(BYTES, N=64) as lease:
            slot.upload(lease.x)


@pytest.mark.parametrize("wrong", ["1", 0.0, True, None])
def test_an_offset_is_an_integer(wrong: Any) -> None:
    """A float would reach the device, whose error then refuses everything."""
    _, ws = host()
    with ws.staging("s", 64).fill() as slot, ws.lease(BYTES, N=32) as lease:
        with pytest.raises(ArgumentError, match="offset="):
            slot.upload(lease.x, offset=wrong)
        slot.upload(lease.x, offset=32)


def test_a_slot_is_no_tensor_before_its_use_is_declared_or_refused() -> None:
    """To look at what was passed allocates nothing."""
    _, ws = host("caching")
    with ws.lease(BYTES, N=64) as lease:
        with ws.staging("s", 16).fill() as slot, pytest.raises(ArgumentError, match="offset"):
            slot.upload(lease.x, offset="0")
        assert ws.snapshot().allocated == 0


def test_a_lease_waits_for_what_can_be_awaited() -> None:
    """Refused by name, and the lease is released as if nothing had been said."""
    _, ws = scene(reserve=MIB)
    with ws.lease(BYTES, N=MIB) as lease, pytest.raises(ArgumentError, match=r"5 has no wait\(\)"):
        lease.until(5)
    assert ws.snapshot().allocated == 0


def test_lists_and_sizes_are_shapes() -> None:
    """What torch takes as a shape is one here."""
    _, ws = host()
    assert [tuple(ws.empty(shape, U8).shape) for shape in ((2, 3), [2, 3], torch.Size((2, 3)))] == [(2, 3)] * 3


@pytest.mark.parametrize("wrong", [{"memory": "hots"}, {"execution": "lazy"}])
def test_a_device_is_of_a_known_kind(wrong: dict[str, Any]) -> None:
    """The error lists the kinds."""
    with pytest.raises(DeviceError, match="is not known") as caught:
        Device(**wrong)
    assert "'host' or 'virtual'" in caught.value.remedy or "'immediate' or 'deferred'" in caught.value.remedy


def test_a_break_that_cannot_be_called_leaves_the_capture_open() -> None:
    """Refused before the segment ends: the graph is one segment, as if nothing had been said."""
    _, ws = scene(reserve=MIB)
    with ws.on(ws.stream("main")), ws.capture() as capture:
        with pytest.raises(ArgumentError, match="5 cannot be called"):
            capture.eager_break(5)  # type: ignore[arg-type]
    assert capture.graph.segments == 1


# -- trace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "says"), [("", "Is a directory"), ("no/such/t.jsonl", "No such file or directory")])
def test_a_trace_that_cannot_be_opened_is_refused_at_once(tmp_path: Path, path: str, says: str) -> None:
    """By create, with the path; no lease finds out later."""
    with pytest.raises(ConfigError, match=says) as caught:
        scene(trace=tmp_path / path)
    assert caught.value.fields["key"] == "trace"


@pytest.mark.parametrize("strategy", ["caching", "event_fenced", "per_stream"])
def test_a_full_disk_costs_the_trace_and_no_block(strategy: str) -> None:
    """The acquire that could not be traced took nothing and says so; the next one is served, untraced."""
    device, ws = scene(strategy, trace="/dev/full", guard=0, limit=MIB)
    with pytest.raises(TraceError, match="/dev/full ends here: No space left"):
        ws.acquire(BYTES, N=MIB // 2)
    assert ws.snapshot().allocated == 0 and not ws.timeline.state.held
    for _ in range(3):
        write(device, ws, "untraced", MIB // 2, ws.stream("main"))
    assert ws.snapshot().allocated == 0 and device.verdict() == "SAFE"
    ws.close()


def test_a_disk_that_fills_up_costs_no_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release raises, and the bytes are free all the same."""
    _, ws = scene(trace=tmp_path / "t", limit=MIB)
    lease = ws.acquire(BYTES, N=MIB)
    assert isinstance(ws.provider, Trace)
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(ws.provider._file, "_file", full)
        with pytest.raises(TraceError, match="ends here"):
            lease.release()
    assert lease.released and ws.snapshot().allocated == 0
    with ws.lease(BYTES, N=MIB):
        pass


def test_dims_beyond_64_bits_are_traced(tmp_path: Path) -> None:
    """A dim may be larger than the sizes that are computed from it."""
    _, ws = scene(trace=tmp_path / "t")
    with ws.lease(Layout("wide", x=spec(f"T//{2**60}", dtype=U8)), T=2**70):
        pass
    first = json.loads((tmp_path / "t").read_text().splitlines()[0])
    assert first["dims"] == {"T": 2**70} and first["nbytes"] == 1024


# -- guard, races, refusals ----------------------------------------------------------------------------------------


def test_guard_bands_need_bytes_to_compare() -> None:
    """Refused when the workspace is made, not at the first release."""
    with pytest.raises(ConfigError, match="guard=256 on virtual memory"):
        scene(guard=256)
    with host(guard=256)[1].lease(BYTES, N=1):
        pass


@pytest.mark.parametrize("sites", [True, False])
def test_a_race_without_call_sites_says_how_to_get_them(sites: bool) -> None:
    """And one with them does not."""
    device = Device(memory="virtual", sites=sites)
    ws = workspace.create("event_fenced", device=device)
    side = ws.stream("side")
    with ws.lease(BYTES, N=8) as lease:
        device.launch("write", writes=[lease.x])
        device.launch("read", reads=[lease.x], stream=side.key)
    assert ("sites=True" in str(device.races()[0])) == (not sites)
    assert ("test_arguments.py" in str(device.races()[0])) == sites


def test_the_remedy_fits_the_refusal() -> None:
    """Too little, too little in one piece, a fence that the policy forbids, growth that it forbids."""
    device, ws = scene(reserve=2 * MIB)
    ws.lock()
    with pytest.raises(workspace.errors.CapacityError) as caught:
        ws.acquire(BYTES, N=3 * MIB)
    assert caught.value.remedy.startswith("declare the layout's largest dims before reserve()")
    held = [ws.acquire(BYTES, N=MIB // 2) for _ in range(4)]
    held[0].release(), held[2].release()
    with pytest.raises(workspace.errors.CapacityError) as caught:
        ws.acquire(BYTES, N=MIB)
    assert caught.value.remedy.startswith("bytes are free, in pieces too small")
    device, ws = scene(reserve=2 * MIB, policy="grow")
    ws.lock()
    write(device, ws, "other", 2 * MIB, ws.stream("other"))
    with pytest.raises(workspace.errors.CapacityError) as caught:
        ws.acquire(BYTES, N=2 * MIB)
    assert "allow fences" in caught.value.remedy and caught.value.fields["setting"] == "policy"
    _, ws = scene(policy="fence")
    with pytest.raises(workspace.errors.CapacityError) as caught:
        ws.acquire(BYTES, N=MIB)
    assert "allow growth" in caught.value.remedy and caught.value.fields["setting"] == "policy"


# -- owners --------------------------------------------------------------------------------------------------------


def test_an_owner_that_shares_the_pool_locks_it() -> None:
    """It has none of its own: its lock is the workspace's, both ways."""
    _, ws = scene(owners={"apart": "per_stream"})
    shared, apart = ws.owner("shared"), ws.owner("apart")
    shared.lock()
    assert ws.locked and shared.locked and apart.locked
    for one in (ws, shared, apart):
        with pytest.raises(workspace.errors.CapacityError):
            one.acquire(BYTES, N=MIB)
    ws.unlock()
    assert not shared.locked and not apart.locked
    apart.lock()
    assert not ws.locked
    with ws.lease(BYTES, N=MIB):
        pass


def test_an_owner_that_is_closed_leaves_the_pool_to_the_others() -> None:
    """Its persistent buffers go, its own leases forbid it, others' do not; another of that name may be made."""
    device, ws = scene(reserve=MIB)
    owner = ws.owner("draft")
    kept = owner.persistent("counter", (4,), U8)
    mine, others = owner.acquire(BYTES, N=100), ws.acquire(BYTES, N=100)
    with pytest.raises(LockError, match="256 bytes are on lease"):
        owner.close()
    mine.release()
    reserved = ws.snapshot().reserved
    owner.close()
    assert owner.closed and not ws.closed and ws.snapshot().reserved == reserved
    with pytest.raises(WorkspaceError, match="is closed"):
        owner.acquire(BYTES, N=1)
    device.launch("still there", writes=[others.x])
    others.release()
    again = ws.owner("draft")
    assert again is not owner and again is ws.owner("draft")
    with again.lease(BYTES, N=100):
        pass
    assert kept.numel() == 4
    ws.close()
    assert again.closed
    with pytest.raises(WorkspaceError, match="is closed"):
        ws.owner("draft")
