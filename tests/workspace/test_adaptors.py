"""Adaptors: guard bands, poison, statistics, limit and trace; alone, together, and inside captures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, host, scene, write
from workspace import Layout, Workspace, spec
from workspace.adaptors.adaptor import Adaptor
from workspace.adaptors.compose import ORDER, check_order, find
from workspace.adaptors.guard import Guard
from workspace.adaptors.limit import Limit
from workspace.adaptors.poison import Poison
from workspace.adaptors.statistics import Statistics
from workspace.adaptors.trace import Trace
from workspace.errors import CapacityError, ConfigError, DriverError, GuardError
from workspace.simulated import SimulatedGraph

SAFE = ["caching", "event_fenced", "per_stream"]
BLOCKS = ["event_fenced", "per_stream"]
MIXED = Layout("mixed", f=spec(3, dtype=torch.float32), i=spec(5, dtype=torch.int16), b=spec(7, dtype=torch.bool))


def chain(ws: Workspace) -> list[type]:
    found: list[type] = []
    provider: Any = ws.provider
    while isinstance(provider, Adaptor):
        found.append(type(provider))
        provider = provider.inner
    return found


def test_an_absent_adaptor_costs_nothing() -> None:
    """Without settings the provider is the strategy itself."""
    _, ws = scene()
    assert ws.provider is ws.strategy_object and chain(ws) == []


def test_adaptors_nest_in_one_order(tmp_path: Path) -> None:
    """Trace > guard > poison > statistics > limit, whatever is left out."""
    _, ws = host(trace=tmp_path / "t", guard=256, poison=True, statistics=True, limit=MIB)
    assert tuple(chain(ws)) == ORDER
    _, ws = host(guard=256, limit=MIB)
    assert chain(ws) == [Guard, Limit]
    assert find(ws.provider, Limit) is not None and find(ws.provider, Poison) is None


def test_another_order_is_refused() -> None:
    """A guard inside poison would see its bands poisoned; the same adaptor twice is refused too."""
    _, ws = scene()
    strategy, timeline = ws.strategy_object, ws.timeline
    for wrong in (Poison(Guard(strategy, timeline), timeline), Limit(Limit(strategy, 1), 1)):
        with pytest.raises(ConfigError, match="trace > guard > poison > statistics > limit"):
            check_order(wrong)


# -- guard bands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize(("where", "at"), [("before", -1), ("before", -200), ("after", 256), ("after", 400), (None, 0)])
def test_a_write_outside_the_lease_is_found_at_its_release(strategy: str, where: str | None, at: int) -> None:
    """The error names the owner, the side and the offset; the bytes come back all the same."""
    device, ws = host(strategy, guard=256)
    layout = Layout("victim", x=spec(256, dtype=torch.uint8))
    lease = ws.acquire(layout)
    device.memset(lease.x.data_ptr() + at, 1, 0x11)
    if where is None:
        lease.release()
    else:
        with pytest.raises(GuardError, match=f"1 bytes {where} the lease of victim") as caught:
            lease.release()
        assert caught.value.fields["offset"] == (at if where == "before" else at - 256)
    assert lease.released and ws.snapshot().allocated == 0
    with ws.lease(layout):
        pass


CHANGES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "resized": (lambda tensor: tensor.resize_(3, 4), r"of shape \(3, 4\) instead of \(4, 4\)"),
    "transposed": (lambda tensor: tensor.t_(), "has strides"),
    "graded": (lambda tensor: tensor.requires_grad_(), "requires a gradient"),
    "set": (lambda tensor: tensor.set_(torch.zeros(2, 2)), "of shape"),
    "other bytes": (lambda tensor: setattr(tensor, "data", torch.zeros(4, 4)), "is of other bytes"),
}


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("guarded", [True, False])
def test_a_tensor_changed_in_place_is_found_and_forgotten(strategy: str, change: str, guarded: bool) -> None:
    """Control: without guard bands the next lease gets the tensor as it was left."""
    ws = workspace.create(strategy, device="cpu", guard=256 if guarded else 0)
    layout = Layout("rows", x=spec(4, 4, dtype=torch.float32), y=spec(2, dtype=torch.float32))
    make, message = CHANGES[change]
    lease = ws.acquire(layout)
    make(lease.x)
    if guarded:
        with pytest.raises(GuardError, match=f"'x' of the lease of rows was changed in place: it .*{message}"):
            lease.release()
    else:
        lease.release()
    with ws.lease(layout) as again:
        as_lent = again.x.shape == (4, 4) and again.x.is_contiguous() and not again.x.requires_grad
        assert (as_lent and again.x.data_ptr() == again.address) is guarded
        again.x.detach().zero_()
    ws.close()


@pytest.mark.parametrize("align", [16, 4096])
def test_bands_touch_no_payload(align: int) -> None:
    """They lie outside the tensors, whatever the alignment."""
    _, ws = host(guard=512)
    layout = Layout("wide", x=spec(1000, dtype=torch.uint8, align=align))
    for _ in range(2):
        with ws.lease(layout) as lease, ws.lease(layout) as other:
            lease.x.fill_(1)
            other.x.fill_(2)
            assert lease.x.eq(1).all() and other.x.eq(2).all()


def test_bands_are_captured_and_not_read_back() -> None:
    """Inside a capture the host cannot look; a replay writes them again."""
    device, ws = host(guard=256)
    ws.declare(BYTES, N=MIB)
    ws.reserve()
    main = ws.stream("main")
    with ws.on(main), ws.capture() as capture, ws.lease(BYTES, N=100) as lease:
        device.launch("captured", writes=[lease.x])
    capture.graph.replay(main)
    assert device.verdict() == "SAFE"


# -- poison ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SAFE)
def test_a_fresh_lease_is_poisoned(strategy: str) -> None:
    """Floats are NaN, everything else 0xCB."""
    _, ws = host(strategy, poison=True)
    for _ in range(2):
        with ws.lease(MIXED) as lease:
            assert all(math.isnan(value) for value in lease.f.tolist())
            assert lease.i.view(torch.uint8).eq(0xCB).all()
            lease.f.fill_(1), lease.i.fill_(1)


@pytest.mark.parametrize("strategy", BLOCKS)
def test_a_late_reader_finds_poison(strategy: str) -> None:
    """What is left behind at release is the pattern."""
    _, ws = host(strategy, poison=True)
    with ws.lease(BYTES, N=8) as lease:
        tensor = lease.x
        tensor.fill_(1)
    assert tensor.eq(0xCB).all()


@pytest.mark.parametrize("ended", ["single", "lease of another thread's slot"])
def test_a_release_during_a_capture_is_not_captured(ended: str) -> None:
    """The fill would overwrite somebody else's bytes at each replay."""
    device, ws = scene(poison=True, reserve=SLAB, micro_batches=2)
    main = ws.stream("main")
    with ws.on(main):
        if ended == "single":
            tensor = ws.empty((1024,), torch.uint8)
        else:
            with ws.slot(micro_batch=1):
                lease = ws.acquire(BYTES, N=1024)
        with ws.capture() as capture:
            if ended == "single":
                del tensor
            else:
                lease.release()
            with ws.lease(BYTES, N=16):
                pass
    (graph,) = capture.graph._segments
    assert isinstance(graph, SimulatedGraph)
    assert 0 < sum(nbytes for _, nbytes in graph.writes) < 1024


@pytest.mark.parametrize("strategy", SAFE)
@pytest.mark.parametrize("where", ["in its branch", "after the join", "on the branch's stream", "behind a break"])
def test_a_capture_is_as_valid_with_poison(monkeypatch: pytest.MonkeyPatch, strategy: str, where: str) -> None:
    """A fill on a branch that has been joined would be left unjoined."""
    filled, fill = list[str](), Poison._fill_released
    monkeypatch.setattr(Poison, "_fill_released", lambda *a: (filled.append(a[2].name), fill(*a)))
    device, ws = scene(strategy, poison=True, reserve=SLAB)
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main), ws.capture() as capture:
        with ws.fork(aux) as branch, branch(aux):
            lease = ws.acquire(BYTES, N=SLAB)
            device.launch("branch", writes=[lease.x])
            if where == "in its branch":
                lease.release()
        if where == "behind a break":
            capture.eager_break(lambda: None)
        if not lease.released:
            device.launch("parent", reads=[lease.x])
            with ws.on(aux if where == "on the branch's stream" else main):
                lease.release()
        with ws.lease(BYTES, N=SLAB) as lease:
            device.launch("next", writes=[lease.x])
    for _ in range(2):
        capture.graph.replay(main)
    assert device.verdict() == "SAFE"
    first = "aux" if where == "in its branch" else "main"
    assert filled == ([] if strategy == "caching" else [first, "main"])


def test_poison_waits_for_declared_uses() -> None:
    """The fill is the last use, so the next owner waits for it and not for the reader."""
    device, ws = scene(poison=True)
    aux = ws.stream("aux")
    with ws.lease(BYTES, N=SLAB) as lease:
        device.launch("fill", writes=[lease.x])
        event = ws.event()
        event.record()
        event.wait(aux)
        lease.use(aux)
        device.launch("read", reads=[lease.x], stream=aux.key)
    write(device, ws, "next", SLAB, aux)
    assert device.verdict() == "SAFE"


# -- statistics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SAFE)
def test_statistics_count_by_owner(strategy: str) -> None:
    """Bytes now, the largest so far, requests; blocks count rounded, tensors exactly."""
    _, ws = host(strategy, statistics=True)
    with ws.lease(BYTES, N=1000) as one, ws.lease(OTHER, N=10) as two:
        for tensor in (one.x, two.y):
            tensor.fill_(0)
        held = ws.snapshot()
        assert held.owners["bytes"].allocated == (1000 if strategy == "caching" else 1024)
        assert held.owners["other"].allocated == (10 if strategy == "caching" else 256)
    with ws.lease(BYTES, N=10) as one:
        one.x.fill_(0)
    after = ws.snapshot()
    assert (after.owners["bytes"].allocated, after.owners["bytes"].acquires) == (0, 2)
    assert after.owners["bytes"].peak == held.owners["bytes"].allocated
    assert after.peak_allocated == sum(owner.allocated for owner in held.owners.values())


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("settings", [{}, {"statistics": True}])
def test_a_footprint_is_nobodys_loan(strategy: str, settings: dict[str, Any]) -> None:
    """Bytes that a graph pins are its lane's, and not the last owner's."""
    _, ws = scene(strategy, reserve=MIB, **settings)
    main = ws.stream("main")
    with ws.on(main):
        with ws.lease(OTHER, N=100):
            pass
        with ws.capture() as capture, ws.lease(BYTES, N=1024):
            pass
    snapshot = ws.snapshot()
    assert snapshot.footprints == {"main": 1024} and snapshot.allocated == 0
    assert all(owner.allocated == 0 for owner in snapshot.owners.values())
    capture.graph.release()


def test_a_snapshot_is_a_copy() -> None:
    """It does not change when the workspace does."""
    _, ws = scene(statistics=True)
    with ws.lease(BYTES, N=100):
        before = ws.snapshot()
    assert before.owners["bytes"].allocated == 256 and ws.snapshot().owners["bytes"].allocated == 0


# -- limit -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SAFE)
def test_a_limit_bounds_what_is_on_loan(strategy: str) -> None:
    """The refusal names owner, bytes asked, bytes on loan and the setting; releases make room."""
    _, ws = host(strategy, limit=4096)
    with ws.lease(BYTES, N=3000) as lease:
        lease.x.fill_(0)
        with pytest.raises(CapacityError, match="limit=4096") as caught, ws.lease(OTHER, N=2000) as other:
            other.y.fill_(0)
    assert caught.value.fields["owner"] == "other" and caught.value.fields["setting"] == "limit"
    assert caught.value.fields["allocated"] == (3000 if strategy == "caching" else 3072)
    with ws.lease(OTHER, N=4000) as other:
        other.y.fill_(0)


def test_a_limit_holds_in_captures_too() -> None:
    """Leases of a capture are on loan while they are held."""
    _, ws = scene(limit=4096, reserve=MIB)
    with ws.on(ws.stream("main")):
        held = ws.acquire(BYTES, N=3000)
        with ws.capture():
            with pytest.raises(CapacityError, match="limit"):
                ws.acquire(BYTES, N=3000)
            with ws.lease(BYTES, N=1000):
                pass
        held.release()


# -- trace -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SAFE)
def test_a_trace_has_one_line_for_each_placement_and_return(strategy: str, tmp_path: Path) -> None:
    """In host order; a file that exists is appended to."""
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        _, ws = scene(strategy, trace=path, reserve=MIB)
        main = ws.stream("main")
        with ws.on(main):
            with ws.lease(BYTES, N=100):
                pass
            with ws.capture() as capture, ws.lease(OTHER, N=50):
                pass
        capture.graph.release()
        ws.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    acquires = [line for line in lines if line["event"] == "acquire"]
    assert [(line["owner"], line["dims"], line["captured"]) for line in acquires] == 2 * [
        ("bytes", {"N": 100}, False), ("other", {"N": 50}, True),
    ]  # fmt: skip
    assert {line["stream"] for line in acquires} == {"main"}
    if strategy != "caching":
        assert [line["event"] for line in lines] == ["acquire", "release"] * 4
        assert all(taken["address"] == given["address"] for taken, given in zip(lines[::2], lines[1::2], strict=True))


# -- together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SAFE)
def test_all_adaptors_together(strategy: str, tmp_path: Path) -> None:
    """Leases, forks, single tensors and captures work as without, and everything comes back."""
    device, ws = host(strategy, trace=tmp_path / "t", guard=256, poison=True, statistics=True, limit=64 * MIB)
    ws.declare(BYTES, N=MIB)
    ws.reserve()
    main, aux = ws.stream("main"), ws.stream("aux")
    with ws.on(main):
        for _ in range(3):
            with ws.lease(BYTES, N=5000) as lease:
                device.launch("write", writes=[lease.x])
                with ws.fork(aux) as branch, branch(aux), ws.lease(OTHER, N=100) as inner:
                    device.launch("branch", reads=[lease.x], writes=[inner.y])
        with ws.capture() as capture, ws.lease(BYTES, N=5000) as lease:
            device.launch("captured", writes=[lease.x])
        capture.graph.replay()
        capture.graph.release()
    tensor = ws.empty((300,), torch.uint8)
    device.launch("single", writes=[tensor])
    del tensor
    snapshot = ws.snapshot()
    assert device.verdict() == "SAFE" and snapshot.allocated == 0
    assert all(owner.allocated == 0 for owner in snapshot.owners.values())


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("setting", [{"guard": 256}, {"poison": True}, {"guard": 256, "limit": MIB, "poison": True}])
def test_a_fill_that_fails_leaves_nothing_on_loan(
    monkeypatch: pytest.MonkeyPatch, strategy: str, setting: dict[str, Any]
) -> None:
    """The acquire raises the device's error; the bytes are free again and the next acquire is served."""
    _, ws = host(strategy, **setting)

    def fails(address: int, nbytes: int, value: int, stream: int) -> None:
        raise DriverError("memset failed")

    monkeypatch.setattr(ws.driver, "memset", fails)
    with pytest.raises(DriverError, match="memset failed"):
        ws.acquire(BYTES, N=100)
    monkeypatch.undo()
    assert ws.snapshot().allocated == 0 and not ws.timeline.state.held
    limit = find(ws.provider, Limit)
    assert limit is None or limit._lent == [0]  # type: ignore[attr-defined]
    ws.acquire(BYTES, N=100)


def test_statistics_know_the_call_site() -> None:
    """A fence then names both places in the caller's code."""
    device, ws = scene(statistics=True)
    write(device, ws, "one", SLAB, ws.stream("one"))
    with ws.on(ws.stream("two")), ws.lease(BYTES, N=SLAB):
        pass
    ((reason, _),) = [one for one in ws.explain() if one[0].kind == "fence"]
    assert "test_adaptors.py:" in reason.site and "scene.py:" in reason.other_site
    assert isinstance(find(ws.provider, Statistics), Statistics) and find(ws.provider, Trace) is None
