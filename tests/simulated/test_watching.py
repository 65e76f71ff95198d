"""A device that watches is told of a workspace that is not its own: what that one orders or lends, it cannot judge."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import workspace
from tests.workspace.forms import BOTH, running
from workspace import Layout, Workspace, spec, watching
from workspace.simulated import Device

PART = Layout("part", q=spec("T", dtype=torch.uint8))
STRATEGIES = ("caching", "event_fenced", "per_stream")


@pytest.fixture(params=BOTH, autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    with running(request.param), torch.inference_mode():
        yield
    assert not watching.watched()


def deferred(seed: int = 1) -> Device:
    return Device(execution="deferred", seed=seed)


OTHERS: dict[str, Callable[[], Any]] = {
    "the host": lambda: "cpu",
    "another simulated device": lambda: deferred(seed=7),
    "one that runs at once": Device,
    "a driver": lambda: deferred().driver(),
}


@pytest.fixture(params=OTHERS)
def other(request: pytest.FixtureRequest) -> Any:
    return OTHERS[request.param]()


def race(ws: Workspace) -> None:
    """A use on a stream that nobody declared, then one by the next lease of the bytes."""
    side = ws.stream("side")
    with ws.lease(PART, T=64) as part, ws.on(side):
        part.q.zero_()
    with ws.lease(PART, T=64) as part:
        part.q.fill_(1)


def lease(ws: Workspace) -> None:
    with ws.lease(PART, T=64) as part:
        part.q.fill_(1)


def acquire(ws: Workspace) -> None:
    ws.acquire(PART, T=64).release()


def fork(ws: Workspace) -> None:
    with ws.fork(ws.stream("side")) as branch, branch(ws.stream("side")):
        pass


def on(ws: Workspace) -> None:
    with ws.on(0):
        pass


def capture(ws: Workspace) -> None:
    with ws.on(ws.stream("side")), ws.capture():
        pass


def staging(ws: Workspace) -> None:
    with ws.staging("host", 256).fill() as slot:
        slot.upload(ws.persistent("there", (4,), torch.uint8))


USES: dict[str, Callable[[Workspace], Any]] = {
    "a lease": lease,
    "an acquire": acquire,
    "a fork": fork,
    "a current stream": on,
    "an event": lambda ws: ws.event().record(),
    "a single tensor": lambda ws: ws.empty((4,), torch.uint8),
    "a buffer": lambda ws: ws.persistent("there", (4,), torch.uint8),
    "a capture": capture,
    "an upload": staging,
}


def kept(ws: Workspace) -> dict[str, Callable[[], Any]]:
    """What is made before a device is entered, and used inside."""
    side, event, ring = ws.stream("kept"), ws.event(), ws.staging("kept", 256)
    branch, forked, bound, begun = ws.on(side), ws.fork(side), ws.on, ws.capture()
    there = ws.persistent("kept", (4,), torch.uint8)
    with ws.on(side), ws.capture() as captured:
        there.add_(1)
    idle = ws.lease(PART, T=64)

    def enter(*what: Any) -> None:
        with ExitStack() as entered:
            for one in what:
                entered.enter_context(one)

    def upload() -> None:
        with ring.fill() as slot:
            slot.upload(there)

    return {
        "a branch": lambda: enter(branch),
        "a fork": lambda: enter(forked),
        "a method": lambda: enter(bound(side)),
        "an event": event.record,
        "a wait": lambda: (event.record(), event.wait(side)),
        "a capture": lambda: enter(branch, begun),
        "a replay": lambda: captured.graph.replay(side),
        "an upload": upload,
        "a lease": lambda: enter(idle),
    }


KEPT = ("a branch", "a fork", "a method", "an event", "a wait", "a capture", "a replay", "an upload", "a lease")


@pytest.mark.parametrize("what", KEPT)
def test_what_was_made_before_is_noticed_when_it_is_used(what: str) -> None:
    """On the device it is of it is nobody's business, entered or not."""
    for own in (False, True):
        device, other = deferred(), deferred(seed=7)
        with device if own else other:
            uses = kept(workspace.create("event_fenced", device=device if own else other))
        with device:
            torch.zeros(4).add_(1)
            uses[what]()
        assert device.verdict() == ("SAFE" if own else "UNKNOWN"), device.reasons()


VERBS = ("set_stream", "record", "wait", "begin_capture", "launch", "upload")


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_of_a_stream_tells(verb: str) -> None:
    """Each alone: what a fork or a replay does besides is not what is noticed."""
    device, other = deferred(), Device()
    driver, x = other.driver(), torch.zeros(4)
    stream, event, there = other.new_stream("side"), other.new_event(), other.empty((4,), torch.float32)
    other.record(event, stream)
    captured = other.new_stream("captured")
    other.begin_capture(captured)
    graph = other.end_capture(captured)
    calls: dict[str, Callable[[], Any]] = {
        "set_stream": lambda: driver.set_stream(stream),
        "record": lambda: driver.record(event, stream),
        "wait": lambda: driver.wait(event, stream),
        "begin_capture": lambda: driver.begin_capture(stream),
        "launch": lambda: other.launch_graph(graph, stream),
        "upload": lambda: driver.upload(x.view(torch.uint8), 0, there, stream),
    }
    with device:
        torch.zeros(4).add_(1)
        assert device.verdict() == "SAFE"
        calls[verb]()
        assert device.verdict() == "UNKNOWN"
    if verb == "begin_capture":
        driver.end_capture(stream)
    driver.set_stream(0)


def test_a_method_bound_inside_goes_on_outside() -> None:
    device = deferred()
    ws = workspace.create("event_fenced", device=device)
    side = ws.stream("side")
    with device:
        on, fork = ws.on, ws.fork
    with on(side), fork(ws.stream("other")):
        pass


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_race_in_a_workspace_of_another_device_is_not_safe(other: Any, strategy: str) -> None:
    """Its streams are none to the device that watches: to it, all is on one. The reason says what to write."""
    device = deferred()
    with device:
        ws = workspace.create(strategy, device=other)
        race(ws)
    assert device.races() == [] and device.verdict() == "UNKNOWN"
    reason, *_ = device.reasons()
    assert f"workspace 'root' ({strategy}) is of another device, {ws.device}" in reason and "device=device" in reason


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("use", USES)
def test_each_use_alone_is_noticed(other: Any, use: str, before: bool) -> None:
    """Also of a workspace that was made, and used, before the device was entered."""
    device, x = deferred(), torch.zeros(4)
    ws = workspace.create("event_fenced", device=other)
    if before:
        lease(ws) if ws.device == torch.device("cpu") else ws.stream("main")
    with device:
        x.add_(1)
        USES[use](ws if before else workspace.create("event_fenced", device=other))
    assert device.verdict() == "UNKNOWN" and "another device" in device.reasons()[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_workspace_of_the_device_is_none_of_another(strategy: str) -> None:
    """The control: all of these, and an owner's, on the device itself; plain tensors of the host are not leases."""
    device = deferred()
    ws = workspace.create(strategy, device=device)
    with device:
        for use in USES.values():
            use(ws)
            use(ws.owner("part"))
            use(workspace.create(strategy, device=device.driver()))
        torch.zeros(4).add_(1)
    assert device.verdict() == "SAFE" and device.reasons() == []


def test_a_race_that_is_found_stays_one(other: Any) -> None:
    """The verdict is UNSAFE, and the reasons are there beside it."""
    device = deferred()
    with device:
        race(workspace.create("event_fenced", device=device))
        assert device.verdict() == "UNSAFE"
        lease(workspace.create("event_fenced", device=other))
    assert device.verdict() == "UNSAFE" and "another device" in " ".join(device.reasons())


def test_each_workspace_is_named_once() -> None:
    """By its owner's name, however often it lends; streams are the device's."""
    device = deferred()
    ws = workspace.create("event_fenced")
    with device:
        for _ in range(3):
            race(ws)
            race(ws.owner("attention"))
    assert [reason.split(" is of ")[0].split(" was used ")[0] for reason in device.reasons()] == [
        "workspace 'root' (event_fenced)",
        "a workspace of another device",
        "workspace 'attention' (event_fenced)",
    ]


def test_the_innermost_device_watches() -> None:
    """Nested, the operations are that one's alone; the outer one's workspace is used before and afterwards."""
    outer, inner = deferred(), deferred(seed=2)
    mine, its = (workspace.create("event_fenced", device=device) for device in (outer, inner))
    with outer:
        lease(mine)
        shown = dict(outer.counters)
        with inner:
            lease(its)
            with inner:
                lease(its)
                torch.zeros(4).view(2, 2).add_(1).sum().item()
            race(its)
        assert dict(outer.counters) == shown
        with outer:
            lease(mine)
    assert inner.verdict() == "UNSAFE"
    assert outer.verdict() == "SAFE" and outer.counters["launch"] > shown["launch"]
    with outer:
        lease(its)
    assert outer.verdict() == "UNKNOWN"


@pytest.mark.parametrize("what", ("lease", "streams"))
@pytest.mark.parametrize("whose", ("outer", "inner", "third"))
def test_each_device_that_is_entered_knows_what_it_does_not_see(whose: str, what: str) -> None:
    """The outer one's own workspace, used inside the inner one: both see a part."""
    devices = {"outer": deferred(), "inner": deferred(seed=2), "third": deferred(seed=3)}
    ws = workspace.create("event_fenced", device=devices[whose])
    with devices["outer"], devices["inner"]:
        for device in (devices["outer"], devices["inner"]):
            device.launch("an operation that it judges")
        lease(ws) if what == "lease" else ws.event().record()
    for name in ("outer", "inner"):
        reasons = " ".join(devices[name].reasons())
        assert devices[name].verdict() == ("SAFE" if whose == "inner" else "UNKNOWN")
        assert ("was used inside another device" in reasons) is (name == whose == "outer")
        assert ("of another device" in reasons) is (whose != "inner" and name != whose)


def test_a_workspace_used_outside_is_nobodys_business() -> None:
    """Before, after, and in a thread that has not entered."""
    device, ws = deferred(), workspace.create("event_fenced")

    def outside() -> None:
        with torch.inference_mode():
            for use in USES.values():
                use(ws)

    outside()
    with device:
        torch.zeros(4).add_(1)
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()
    outside()
    assert device.verdict() == "SAFE" and device.reasons() == []


def test_without_the_notice_the_race_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is told is what turns the verdict."""
    monkeypatch.setattr(watching, "tell", lambda workspace: None)
    monkeypatch.setattr(watching, "use", lambda device: None)
    device = deferred()
    with device:
        race(workspace.create("event_fenced"))
    assert device.verdict() == "SAFE"
