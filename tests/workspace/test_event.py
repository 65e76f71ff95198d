"""Events of the user: what they order, and what their misuse cannot order."""

from __future__ import annotations

import pytest

from tests.workspace.scene import BYTES, MIB, SLAB, scene, write
from workspace.errors import CaptureError
from workspace.simulated import Device


def test_an_event_orders_without_a_fence() -> None:
    """Record and wait feed the clocks: the bytes cross without another device call."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    event = ws.event()
    event.record(one)
    event.wait(two)
    write(device, ws, "second", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 0 and len(ws.snapshot().slabs) == 1


def test_a_wait_before_any_record_orders_nothing() -> None:
    """As on the device: the next owner still needs its fence."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    event = ws.event()
    event.wait(two)
    assert event.query()
    event.record(one)
    write(device, ws, "second", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 1


def test_a_second_record_replaces_the_first() -> None:
    """What only the first covered is not ordered by a later wait."""
    device, ws = scene()
    one, two, three = ws.stream("one"), ws.stream("two"), ws.stream("three")
    write(device, ws, "first", SLAB, one)
    event = ws.event()
    event.record(one)
    event.record(three)
    event.wait(two)
    write(device, ws, "second", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 1


@pytest.mark.parametrize("done", [True, False])
def test_a_query_teaches_the_host_only_when_it_is_true(done: bool) -> None:
    """False means nothing; true lets any stream have the bytes."""
    device = Device(memory="virtual", ahead=0 if done else 1 << 40)
    import workspace

    ws = workspace.create("event_fenced", device=device)
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    event = ws.event()
    event.record(one)
    assert event.query() == done
    write(device, ws, "second", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == (0 if done else 1)


@pytest.mark.parametrize("how", ["event", "stream", "device"])
def test_what_the_host_waited_for_is_ordered_everywhere(how: str) -> None:
    """Event, stream and device synchronisation all let the bytes go to any stream."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    event = ws.event()
    event.record(one)
    if how == "event":
        event.synchronize()
    else:
        ws.synchronize(*([one] if how == "stream" else []))
    write(device, ws, "second", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 0


def test_a_record_during_a_synchronisation_is_not_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread records the event anew while the host waits: the device waited for the new record only."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    event = ws.event()
    event.record(one)
    wait = ws.driver.synchronize_event

    def recorded_anew(handle: int) -> None:
        event.record(two)
        wait(handle)

    monkeypatch.setattr(ws.driver, "synchronize_event", recorded_anew)
    event.synchronize()
    write(device, ws, "second", SLAB, two)
    assert device.verdict() == "SAFE" and ws.snapshot().fences == 1


def test_an_event_from_before_a_capture_orders_nothing_inside_it() -> None:
    """Waiting for one inside is refused, unless the host saw it complete; the capture goes on."""
    device, ws = scene(reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    device.launch("before", stream=other.key)
    event = ws.event()
    event.record(other)
    with ws.on(main), ws.capture() as capture:
        with pytest.raises(CaptureError, match="recorded outside"):
            event.wait()
        with ws.lease(BYTES, N=100) as lease:
            device.launch("inside", writes=[lease.x])
    capture.graph.replay(main)
    event.synchronize()
    with ws.on(main), ws.capture() as capture:
        event.wait()
        ws.event().wait()
    assert device.verdict() == "SAFE"


def test_an_event_of_a_capture_is_not_waited_for_outside() -> None:
    """An edge captured once orders nothing eager; recorded again outside, the event works again."""
    _, ws = scene(reserve=MIB)
    main, other = ws.stream("main"), ws.stream("other")
    event = ws.event()
    with ws.on(main), ws.capture():
        event.record()
    with pytest.raises(CaptureError, match="recorded in a capture"):
        event.wait(other)
    event.record(main)
    event.wait(other)
    assert event.query()


@pytest.mark.parametrize("joined", [True, False])
def test_a_stream_joins_a_capture_by_waiting(joined: bool) -> None:
    """Its leases are the footprint's, ordered by captured edges; unjoined, the capture fails and leaves nothing."""
    device, ws = scene(reserve=MIB)
    main, aux = ws.stream("main"), ws.stream("aux")
    write(device, ws, "eager on aux", 4096, aux)
    out, back = ws.event(), ws.event()
    with ws.on(main):
        capture = ws.capture()
        capture.__enter__()
        with ws.lease(BYTES, N=4096) as lease:
            device.launch("main", writes=[lease.x])
            out.record()
            out.wait(aux)
            with ws.on(aux), ws.lease(BYTES, N=4096) as inner:
                device.launch("aux", reads=[lease.x], writes=[inner.x])
            back.record(aux)
            if joined:
                back.wait()
        if joined:
            capture.__exit__(None, None, None)
            capture.graph.replay()
        else:
            with pytest.raises(CaptureError, match="not joined"):
                capture.__exit__(None, None, None)
            assert not ws.timeline.captures and ws.snapshot().footprints == {}
    write(device, ws, "eager again", 4096, aux)
    assert device.verdict() == "SAFE"


def test_two_captures_are_not_joined_and_both_live_on() -> None:
    """A fork or a wait across would break both on the device: it is refused before the device hears of it."""
    device, ws = scene(reserve=SLAB)
    one, two = ws.stream("one"), ws.stream("two")
    with ws.on(one), ws.capture(lane="first") as first, ws.lease(BYTES, N=MIB // 4) as lease:
        device.launch("first", writes=[lease.x])
        with ws.on(two), ws.capture(lane="second") as second, ws.lease(BYTES, N=MIB // 4) as other:
            event = ws.event()
            event.record(one)
            before = dict(device.counters)
            with pytest.raises(CaptureError, match="recorded on .*, in another capture"):
                event.wait()
            with pytest.raises(CaptureError, match="is part of another capture"):
                ws.fork(one).__enter__()
            assert device.counters == before
            device.launch("second", writes=[other.x])
    with ws.on(one):
        first.graph.replay()
        second.graph.replay()
    assert device.verdict() == "SAFE"


def test_an_event_of_an_earlier_segment_is_over() -> None:
    """Its segment comes first at each replay: a wait orders nothing more, and takes no stream into the capture."""
    device, ws = scene(reserve=SLAB)
    main, side = ws.stream("main"), ws.stream("side")
    with ws.on(main), ws.capture() as capture:
        device.launch("first segment")
        event = ws.event()
        event.record()
        capture.eager_break(lambda: device.launch("eager"))
        before = device.counters["wait"]
        event.wait()
        assert device.counters["wait"] == before
        with pytest.raises(CaptureError, match="no longer takes it into the capture"):
            event.wait(side)
        event.record()
        event.wait(side)
        with ws.on(side):
            device.launch("on the side")
            event.record()
        event.wait()
        device.launch("last segment")
    with ws.on(main):
        capture.graph.replay()
    assert device.verdict() == "SAFE"
