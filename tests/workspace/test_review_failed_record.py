"""A device call that fails at the end of a use: nothing stays taken, and the use is not forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workspace.scene import BYTES, SLAB, scene
from workspace.adaptors.poison import Poison
from workspace.errors import DriverError, StreamError
from workspace.lane import Lane
from workspace.strategies.pooled import Pooled
from workspace.timeline import Timeline
from workspace.workspace import Workspace


def failing(*_: object) -> None:
    raise DriverError("out of order")


def failing_on(stream: Any, verb: Any) -> Any:
    """A driver's verb that fails for one stream."""
    return lambda event, key: failing() if key == stream.key else verb(event, key)


def captured(ws: Workspace, device: Any, name: str, before: Any = None) -> Any:
    """A graph in a lane of its own, that writes there and to a lease of before."""
    with ws.capture(lane=name) as capture, ws.lease(BYTES, N=SLAB) as lease:
        device.launch(name, writes=[lease.x] + ([before.x] if before is not None else []))
    return capture.graph


def pinning(ws: Workspace, device: Any) -> tuple[Any, Any]:
    """A graph that writes to a lease of before, and that lease, released."""
    for name in ("graph", "main"):
        ws.declare(BYTES, N=SLAB, lane=name)
    ws.reserve()
    before = ws.acquire(BYTES, N=SLAB)
    graph = captured(ws, device, "graph", before)
    before.release()
    return graph, before


@pytest.mark.parametrize("told", [True, False], ids=["told", "without"])
def test_a_replay_without_an_event_ends_and_is_the_last_use(told: bool) -> None:
    """On a communication stream a replay records its use: where that fails, the lane can be replayed and released."""
    device, ws = scene()
    main, comm = ws.stream("main"), ws.stream("comm", communication=True)
    ws.declare(BYTES, N=SLAB, lane="graph")
    ws.declare(BYTES, N=SLAB)
    ws.reserve()
    with ws.on(main):
        graph, beside = captured(ws, device, "graph"), captured(ws, device, "graph")
        with pytest.MonkeyPatch.context() as broken, pytest.raises(DriverError, match="out of order"):
            broken.setattr(ws.driver, "record", failing_on(comm, ws.driver.record))
            if not told:
                broken.setattr(Lane, "leave", failing)
            graph.replay(comm)
        assert graph.running == 0 and not ws.strategy_object.under_way()
        beside.replay(main)
        graph.release()
        beside.release()
    assert not ws.snapshot().footprints
    assert (device.verdict() == "SAFE") == told


def test_a_lease_that_a_graph_pins_hears_of_such_a_replay() -> None:
    """Released before the graph, its bytes go on once the replay that got no event is over."""
    device, ws = scene()
    main, comm = ws.stream("main"), ws.stream("comm", communication=True)
    with ws.on(main):
        graph, before = pinning(ws, device)
        with pytest.MonkeyPatch.context() as broken, pytest.raises(DriverError, match="out of order"):
            broken.setattr(ws.driver, "record", failing_on(comm, ws.driver.record))
            graph.replay(comm)
        graph.release()
        for _ in range(2):
            with ws.lease(BYTES, N=SLAB) as one, ws.lease(BYTES, N=SLAB) as two:
                device.launch("again", writes=[one.x, two.x])
    assert device.verdict() == "SAFE" and before.released


def test_an_eager_break_without_an_event_ends() -> None:
    """While it is captured, too: the lane of a failed capture is free for the next."""
    device, ws = scene()
    comm = ws.stream("comm", communication=True)
    ws.declare(BYTES, N=SLAB, lane="main")
    ws.reserve()
    with ws.on(comm), pytest.MonkeyPatch.context() as broken, pytest.raises(DriverError, match="out of order"):
        with ws.capture() as capture:
            with ws.lease(BYTES, N=SLAB) as lease:
                device.launch("write", writes=[lease.x])
            capture.eager_break(lambda: broken.setattr(ws.driver, "record", failing))
    assert not ws.strategy_object.under_way() and not ws.snapshot().footprints


@pytest.mark.parametrize(
    ("settings", "communication"),
    [({"recording": "exact"}, False), ({}, True), ({"poison": True}, False), ({"poison": True}, True)],
    ids=["exact", "communication", "poison", "poison-communication"],
)
@pytest.mark.parametrize("verb", ["record", "wait", "memset"])
def test_a_release_that_cannot_record_gives_the_bytes_back(
    settings: dict[str, Any], communication: bool, verb: str
) -> None:
    """With the declared uses: the next lease of the bytes comes after them, and the workspace can be closed."""
    device, ws = scene(**settings)
    main, side = ws.stream("main"), ws.stream("side", communication=communication)
    with ws.on(main):
        lease = ws.acquire(BYTES, N=SLAB)
        lease.use(side)
        ws.timeline.wait(ws.timeline.record(main), side)
        device.launch("write", writes=[lease.x], stream=side.key)
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(ws.driver, verb, failing)
            try:
                lease.release()
            except DriverError as error:
                assert "out of order" in str(error)
        assert lease.released and not ws.timeline.state.held and ws.snapshot().allocated == 0
        for _ in range(2):
            with ws.lease(BYTES, N=SLAB) as again:
                device.launch("again", writes=[again.x])
    assert device.verdict() == "SAFE" and ws.snapshot().reserved == SLAB
    ws.close()


@pytest.mark.parametrize(("owner", "settings"), [(Pooled, {"recording": "exact"}), (Poison, {"poison": True})])
def test_a_block_without_its_uses_is_handed_out_too_early(
    owner: type, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a block that comes back without the use that got no event."""
    give_back = owner.give_back

    def forgetful(self: Any, block: Any, stream: Any) -> None:
        block.uses.pop(side.id, None)
        give_back(self, block, stream)

    monkeypatch.setattr(owner, "give_back", forgetful)
    device, ws = scene(**settings)
    main, side = ws.stream("main"), ws.stream("side")
    with ws.on(main):
        lease = ws.acquire(BYTES, N=SLAB)
        lease.use(side)
        ws.timeline.wait(ws.timeline.record(main), side)
        device.launch("write", writes=[lease.x], stream=side.key)
        lease.release()
        with ws.lease(BYTES, N=SLAB) as again:
            device.launch("again", writes=[again.x])
    assert device.verdict() == "UNSAFE"


def test_a_lease_whose_graph_has_gone_can_be_acquired_again() -> None:
    """Its bytes return with the graph; where the event of that cannot be recorded, they return without."""
    device, ws = scene(recording="exact")
    main = ws.stream("main")
    with ws.on(main):
        graph, before = pinning(ws, device)
        with pytest.MonkeyPatch.context() as broken, pytest.raises(DriverError, match="out of order"):
            broken.setattr(ws.driver, "record", failing)
            graph.release()
        assert ws.snapshot().allocated == 0
        with before:
            device.launch("again", writes=[before.x])
    assert device.verdict() == "SAFE"
    ws.close()


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
@pytest.mark.parametrize("how", ["use", "acquirer"])
@pytest.mark.parametrize("asked", [True, False], ids=["fixed", "as it was"])
def test_a_use_on_a_stream_that_is_gone_keeps_nobody_from_other_bytes(
    strategy: str, how: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release says so; the block waits for a synchronisation, and everybody else is served from other bytes.

    The control asks the device for the stream, as it was: every acquire that met the block raised.
    """
    if not asked:
        monkeypatch.setattr(Timeline, "_recordable", lambda timeline, owner: not timeline.driver.capture_of(owner.key))
    device, ws = scene(strategy, steady=True, reserve=SLAB)
    main, raw = ws.stream("main"), device.new_raw_stream("raw")
    with ws.on(main):
        lease = ws.acquire(BYTES, stream=raw if how == "acquirer" else main, N=SLAB)
        device.launch("write", writes=[lease.x], stream=ws.timeline.of(raw).key)
        if how == "use":
            ws.use(lease, raw)
        device.destroy_stream(raw)
        with pytest.raises(StreamError):
            lease.release()
        if not asked:
            with pytest.raises(StreamError, match="destroyed"):
                ws.acquire(BYTES, N=64)
            return
        for nbytes in (64, SLAB):
            with ws.lease(BYTES, N=nbytes) as other:
                device.launch("write", writes=[other.x])
        grown = ws.snapshot().reserved
        ws.synchronize()
        with ws.lease(BYTES, N=SLAB) as one, ws.lease(BYTES, N=SLAB // 2) as two:
            device.launch("write", writes=[one.x, two.x])
        assert ws.snapshot().reserved == grown
    ws.trim()
    assert device.verdict() == "SAFE" and ws.snapshot().reserved == 0
