"""Late accesses: by a tensor of a lease whose bytes have been lent again, however well ordered they are."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.forms import BOTH, running
from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, host, scene
from workspace import Layout, Workspace, spec
from workspace.simulated import Device
from workspace.simulated.lendings import Lending, Lendings

POOLS = ["event_fenced", "per_stream"]
ROWS = Layout("rows", q=spec("T", 64, dtype=torch.float32), k=spec("T", dtype=torch.int32))
MLP = Layout("mlp", h=spec("T", 64, dtype=torch.float32), g=spec("T", dtype=torch.int32))


@pytest.fixture(params=BOTH, autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    with running(request.param), torch.inference_mode():
        yield


def deferred(strategy: str, **settings: Any) -> tuple[Device, Workspace]:
    """A device that torch's operations are shown to inside ``with device:``, and a workspace on it.

    Its slabs are no larger than a lease, so that the next one of another layout takes the same bytes.
    """
    device = Device(execution="deferred", sites=True)
    return device, workspace.create(strategy, device=device, granularity=512, **settings)


def turns(ws: Workspace, keep: Callable[[Any], Any], layout: Layout = ROWS) -> Any:
    """What is kept of a lease filled with 1, after the next lease of the bytes was filled with 2."""
    with ws.lease(ROWS, T=4) as s:
        s.q.fill_(1)
        kept = keep(s)
    with ws.lease(layout, T=4) as s:
        next(iter(s.tensors.values())).fill_(2)
    return kept


KEPT: dict[str, Callable[[Any], Any]] = {
    "the tensor": lambda s: s.q,
    "a slice": lambda s: s.q[:],
    "a reshape": lambda s: s.q.reshape(-1),
    "a chunk": lambda s: s.q.chunk(2)[0],
    "a view of a view": lambda s: s.q.view(8, 32).t()[:16],
    "detached": lambda s: s.q.detach(),
}


@pytest.mark.parametrize("strategy", POOLS)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("layout", [ROWS, MLP], ids=["again", "another"])
def test_what_was_kept_of_a_lease_is_late_once_its_bytes_are_lent_again(
    strategy: str, kept: str, layout: Layout
) -> None:
    """On the same stream, so that nothing races; the layout's own tensor objects come again in a pool."""
    device, ws = deferred(strategy)
    with device:
        tensor = turns(ws, KEPT[kept], layout)
        found = tensor.sum().item()
    assert found == 2 * tensor.numel() and device.races() == [] and device.verdict() == "UNSAFE"
    (late,) = device.late()
    assert (late.lease, late.since, late.access.write, late.count) == ("rows", layout.name, False, 1)
    assert late.access.owner == layout.name and late.access.label == "aten.sum.default"
    lines = [site[0] for site in (late.lease_site, late.since_site, late.access.site)]
    assert all(__file__ in line for line in lines) and len(set(lines)) == 3
    assert str(late) == device.reasons()[0] and all(line in str(late) for line in lines)


def test_without_objects_of_its_own_a_lease_hides_what_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the pool hands out the same tensors again, which are nobody's."""
    monkeypatch.setattr("workspace.simulated.device.hand_out", lambda tensors, lending: None)
    device, ws = deferred("event_fenced")
    with device:
        kept = turns(ws, KEPT["a slice"])
        assert kept.sum().item() == 2 * kept.numel()
    assert device.late() == [] and device.verdict() == "SAFE"


@pytest.mark.parametrize("strategy", ["caching", *POOLS])
def test_nobody_is_late_inside_a_lease_or_before_the_bytes_are_lent_again(strategy: str) -> None:
    """Leases of the same bytes in turn, views of each, one held around them; what is kept while nobody has it."""
    device, ws = deferred(strategy)
    with device:
        with ws.lease(MLP, T=4) as outer:
            view = outer.h[:2]
            for _ in range(3):
                with ws.lease(ROWS, T=4) as s:
                    rows = s.q[:2]
                    rows.copy_(view)
                    s.q.view(-1).add_(1)
            view.add_(rows)  # still the last one's
        view.sum().item()
    assert device.late() == [] and device.verdict() == "SAFE"


def test_a_fresh_tensor_per_lease_is_never_late() -> None:
    """`caching`: what is kept keeps its memory."""
    device, ws = deferred("caching")
    with device:
        kept = turns(ws, KEPT["a slice"])
        assert kept.sum().item() == kept.numel()
    assert device.verdict() == "SAFE"


def test_writes_host_reads_and_repetitions() -> None:
    """A write says so; reads by the host count; one of a kind is kept."""
    device, ws = deferred("event_fenced")
    with device:
        kept = turns(ws, KEPT["a slice"])
        for _ in range(3):
            kept.zero_()
        kept.tolist()
        torch.nonzero(kept)
        torch.add(torch.ones(4, 64), 1, out=kept)
    found = {(one.access.label, one.access.write): one.count for one in device.late()}
    assert found[("aten.zero_.default", True)] == 3 and found[("host reads by tolist", False)] == 1
    assert ("aten.nonzero.default", False) in found and ("aten.add.out", True) in found
    assert "late access (3 times)" in str(device.late()[0]) and " writes " in str(device.late()[0])


def test_a_single_tensor_has_the_bytes_after_a_lease() -> None:
    """Its own uses are never late, as nobody gets the bytes while it lives; reports name it."""
    device, ws = deferred("event_fenced")
    with device:
        with ws.lease(ROWS, T=4) as s:
            s.q.fill_(1)
            kept = s.q
        single = ws.empty((4, 64), torch.float32, owner="logits")
        single.fill_(2)
        part = single[:2]
        assert kept.sum().item() == 2 * kept.numel()
        del single
        with ws.lease(ROWS, T=4) as s:
            s.q.fill_(3)
        assert part.sum().item() == 2 * part.numel()
    (late,) = device.late()
    assert (late.lease, late.since, late.access.owner) == ("rows", "logits", "logits")


def test_copies_are_of_nobody() -> None:
    """A deep copy, or a file, has bytes of its own."""
    device, ws = deferred("event_fenced")
    with device:
        with ws.lease(ROWS, T=4) as s:
            s.q.fill_(1)
            view, file = s.q[:2], io.BytesIO()
            copied = copy.deepcopy(view)
            torch.save(view, file)
        with ws.lease(ROWS, T=4) as s:
            s.q.fill_(2)
        file.seek(0)
        assert copied.sum().item() == torch.load(file).sum().item() == 128
    assert device.late() == [] and device.verdict() == "SAFE"


@pytest.mark.parametrize("strategy", POOLS)
def test_a_replay_uses_what_its_capture_was_lent(strategy: str) -> None:
    """Two graphs share a lane's bytes: the first one's eager break comes by its own tensors again, in its turn."""
    device, ws = deferred(strategy)
    for layout in (ROWS, MLP):
        ws.declare(layout, T=4, lane="main")
    ws.reserve()
    main, graphs = ws.stream("main"), []
    seen: list[float] = []

    def look(*tensors: torch.Tensor) -> None:
        seen.append(sum(one.sum().item() for one in tensors))

    with device, ws.on(main):
        for layout, value in ((ROWS, 1), (MLP, 2)):
            with ws.capture() as capture, ws.lease(layout, T=4) as s:
                first = next(iter(s.tensors.values()))
                view = first[:2]
                first.fill_(value)
                capture.eager_break(partial(look, view, first))
            graphs.append(capture.graph)
        for graph in (*graphs, *graphs):
            graph.replay(main)
    assert seen[-4:] == [128 + 256, 256 + 512] * 2 and device.late() == [] and device.verdict() == "SAFE"


def test_an_unsafe_strategy_lends_bytes_to_several_at_once() -> None:
    """Neither of two that live beside each other is the earlier: what is wrong there are the races."""
    device, ws = deferred("unfenced", allow_unsafe=True)
    with device, ws.lease(ROWS, T=4) as one, ws.lease(ROWS, T=4) as other:
        other.q.fill_(2)
        one.q[:].sum().item()
    assert device.late() == []


# -- operations that are passed to launch ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", POOLS)
@pytest.mark.parametrize("made", [scene, host], ids=["virtual", "host"])
def test_late_launches(strategy: str, made: Callable[..., tuple[Device, Workspace]]) -> None:
    """By the tensor itself; of virtual tensors by views, too."""
    device, ws = made(strategy)
    with ws.lease(BYTES, N=SLAB) as lease:
        kept, part = lease.x, lease.x[:MIB]
        device.launch("first", writes=[kept])
    device.launch("nobody else yet", reads=[kept, part])
    assert device.late() == [] and device.verdict() == "SAFE"
    with ws.lease(OTHER, N=SLAB) as lease:
        device.launch("second", writes=[lease.y])
    device.launch("late", writes=[kept])
    device.launch("late part", reads=(one for one in [part]))
    assert device.races() == [] and device.verdict() == "UNSAFE"
    labels = [one.access.label for one in device.late()]
    assert labels == (["late", "late part"] if made is scene else ["late"])
    assert "sites=True" in str(device.late()[0])


def test_only_the_bytes_that_were_lent_again_are_late() -> None:
    """A smaller lease takes the beginning: the rest is nobody's still."""
    device, ws = scene(reserve=SLAB)
    with ws.lease(BYTES, N=SLAB) as lease:
        kept, rest = lease.x, lease.x[MIB:]
    with ws.lease(OTHER, N=MIB):
        pass
    device.launch("the rest", writes=[rest])
    assert device.late() == []
    device.launch("all", reads=[kept])
    assert [one.access.label for one in device.late()] == ["all"]


def test_a_device_without_a_log_judges_nothing() -> None:
    """Nor does it make tensors anew."""
    device = Device(execution="deferred", log=False)
    ws = workspace.create("event_fenced", device=device)
    with device:
        turns(ws, KEPT["a slice"]).sum().item()
    assert device.late() == [] and device.verdict() == "UNKNOWN" and device.reasons() == ["the device keeps no log"]


# -- the map -----------------------------------------------------------------------------------------------------


def told(lending: Lending) -> list[tuple[int, int, str]]:
    return [(since.start, since.end, since.owner) for since in lending.since]


def test_each_byte_remembers_who_had_it_next() -> None:
    """The first after each lending, whatever is cut, joined or given back."""
    held = Lendings()
    a = held.lend(0, 100, "a", ())
    b = held.lend(100, 100, "b", ())
    c = held.lend(50, 100, "c", ())
    assert told(a) == [(50, 100, "c")] and told(b) == [(100, 150, "c")]
    d = held.lend(60, 20, "d", ())
    assert told(c) == [(60, 80, "d")] and told(a) == [(50, 100, "c")]
    held.forget(0, 10)
    held.lend(0, 200, "e", ())
    assert told(a) == [(50, 100, "c"), (10, 50, "e")] and told(d) == [(60, 80, "e")]
    assert told(c) == [(60, 80, "d"), (50, 60, "e"), (80, 150, "e")] and len(held) == 1
    assert a.over(((0, 10), (20, 5))) == ((20, 5), a.since[1]) and a.over(((0, 10),)) is None


@pytest.mark.parametrize("seed", range(4))
def test_the_map_says_what_a_table_of_bytes_says(seed: int) -> None:
    """Random lendings of 64 bytes, against one entry a byte."""
    random = torch.Generator().manual_seed(seed)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=random))

    held, made = Lendings(), list[Lending]()
    table: list[int | None] = [None] * 64
    following: dict[tuple[int, int], str] = {}
    for turn in range(200):
        start = below(64)
        nbytes = 1 + below(64 - start)
        if below(5) == 0:
            held.forget(start, start + nbytes)
            fresh = None
        else:
            fresh = len(made)
            made.append(held.lend(start, nbytes, str(turn), ()))
        for byte in range(start, start + nbytes):
            before = table[byte]
            if before is not None and fresh is not None:
                following[before, byte] = str(turn)
            table[byte] = fresh
    for number, lending in enumerate(made):
        for byte in range(64):
            found = lending.over(((byte, 1),))
            assert (found and found[1].owner) == following.get((number, byte))


def test_memory_that_went_back_is_of_nobody() -> None:
    """What the device hands out there later is not lent."""
    device = Device(memory="virtual")
    address = device.malloc(MIB)
    device.lend(address, MIB, "one")
    assert len(device.judge.lendings) == 1  # type: ignore[union-attr]
    device.free(address)
    assert len(device.judge.lendings) == 0  # type: ignore[union-attr]
