"""An error that the device keeps reporting is remembered, whichever verb met it first and whoever asked."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from tests.workspace.scene import BYTES, MIB, SLAB, host
from workspace import Layout, Workspace, spec
from workspace.driver import Driver
from workspace.errors import DriverError, WorkspaceError
from workspace.simulated.graph import SimulatedGraph
from workspace.timeline import Timeline

NOTHING = Layout("nothing", x=spec("N", dtype=torch.uint8))
ASKS_NO_DEVICE = {
    *("current_stream", "set_stream", "owned", "tensor", "address_of", "owner_of", "poll", "on_graph_release"),
    "watch_captures",
}
VERBS = sorted(name for name in vars(Driver) if not name.startswith("_") and callable(getattr(Driver, name)))
ASKS = [*(verb for verb in VERBS if verb not in ASKS_NO_DEVICE), "launch", "reset"]
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("caching", {}),
    ("event_fenced", {"restorable": True, "foreign_captures": "query"}),
    ("per_stream", {"recording": "exact", "poison": True, "guard": 256}),
]


def _prepared(strategy: str, settings: dict[str, Any]) -> tuple[Workspace, dict[str, Callable[[], object]]]:
    """A workspace that has done everything once, and what may meet the error."""
    device, ws = host(strategy, **settings)
    device.driver().attributes = False
    main, aux = ws.stream("main"), ws.stream("aux")
    raw = device.new_raw_stream("raw")
    ws.declare(BYTES, N=SLAB, lane="main")
    ws.reserve()
    captured: list[Any] = []
    with ws.on(main):
        for _ in range(3):
            with ws.lease(BYTES, N=64) as lease, ws.fork(aux):
                lease.allocate()
        event = ws.event()
        event.record()
        for broken in (False, True, False):
            with ws.capture() as capture:
                with ws.lease(BYTES, N=64) as lease:
                    lease.allocate()
                if broken:
                    capture.eager_break(lambda: None)
            captured.append(capture.graph)
    staging, single, foreign = ws.staging("s", 64), ws.empty((64,), torch.uint8), ws.driver.empty((64,), torch.uint8, 0)
    with staging.fill() as slot:
        slot.upload(single)
    waits = ws.acquire(BYTES, stream=aux, N=3 * SLAB)
    waits.allocate()
    graphs: list[Any] = list(captured)

    def lease(**asked: Any) -> None:
        with ws.lease(BYTES, **asked) as made:
            made.allocate()

    def used_elsewhere() -> None:
        with ws.on(main), ws.lease(BYTES, N=64) as made:
            made.allocate()
            made.use(aux)

    def upload() -> None:
        with staging.fill() as slot:
            slot.upload(single)

    def capture(fails: bool = False) -> None:
        with ws.on(main), ws.capture(), ws.fork(aux), ws.lease(BYTES, N=64) as made:
            made.allocate()
            if fails:
                raise KeyError

    def dropped_events() -> None:
        for _ in range(2):
            ws.event().record()
            gc.collect()

    def released() -> None:
        graphs.pop().release()
        ws.unlock()

    def trim() -> None:
        waits.release()
        while graphs:
            graphs.pop().release()
        ws.trim()

    return ws, {
        "lease": lambda: lease(N=64),
        "lease of zeros": lambda: lease(N=64, zero=True),
        "lease elsewhere": lambda: lease(N=64, stream=raw),
        "larger lease": lambda: lease(N=4 * SLAB),
        "empty lease": lambda: ws.acquire(NOTHING, stream=aux, N=0).release(),
        "a lease used elsewhere": used_elsewhere,
        "release": waits.release,
        "event.record": event.record,
        "event.wait": lambda: event.wait(aux),
        "event.query": event.query,
        "event.synchronize": event.synchronize,
        "dropped events": dropped_events,
        "synchronize": ws.synchronize,
        "synchronize a stream": lambda: ws.synchronize(aux),
        "use": lambda: ws.use(single, aux),
        "use of another's": lambda: ws.use(foreign, aux),
        "empty": lambda: ws.empty((MIB,), torch.uint8),
        "empty without bytes": lambda: ws.empty((0,), torch.uint8),
        "persistent": lambda: ws.persistent("p", (64,), torch.uint8),
        "staging": lambda: ws.staging("other", 64),
        "upload": upload,
        "a stream": lambda: ws.stream("another"),
        "a raw stream": lambda: ws.on(raw),
        "a capture": capture,
        "a capture that fails": lambda: capture(True),
        "replay": lambda: graphs[0].replay(main),
        "replay with a break": lambda: graphs[1].replay(main),
        "release of a graph": released,
        "sleep": ws.sleep,
        "trim": trim,
        "close": ws.close,
    }


def _replace(patch: pytest.MonkeyPatch, ws: Workspace, verb: str, by: Callable[[Any], Any]) -> None:
    where: Any = SimulatedGraph if verb in ("launch", "reset") else ws.driver
    patch.setattr(where, verb, by(getattr(where, verb)))


def _met(monkeypatch: pytest.MonkeyPatch, setting: tuple[str, dict[str, Any]], name: str) -> set[str]:
    """The verbs that an operation calls."""
    ws, operations = _prepared(*setting)
    met = set()

    def noting(verb: str, inner: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            met.add(verb)
            return inner(*arguments, **named)

        return called

    with monkeypatch.context() as patch, suppress(WorkspaceError, KeyError):
        for verb in ASKS:
            _replace(patch, ws, verb, partial(noting, verb))
        operations[name]()
    return met


@pytest.mark.parametrize(
    ("setting", "sticky"),
    [*((one, True) for one in SETTINGS), (SETTINGS[1], False)],
    ids=["caching", "event_fenced", "per_stream", "passing"],
)
def test_whoever_meets_it_remembers_it(
    monkeypatch: pytest.MonkeyPatch, setting: tuple[str, dict[str, Any]], sticky: bool
) -> None:
    """What raised it once refuses the next lease with the same error; one that passes is forgotten.

    Events that nobody names any more are freed by whoever makes one next, so that only one operation is sure to.
    """
    error = DriverError("an illegal memory access", "restart", sticky=sticky)

    def failing(*arguments: Any, **named: Any) -> None:
        raise error

    for name in _prepared(*setting)[1]:
        for verb in _met(monkeypatch, setting, name) - (set() if name == "dropped events" else {"free_event"}):
            ws, operations = _prepared(*setting)
            with monkeypatch.context() as patch:
                _replace(patch, ws, verb, lambda inner: failing)
                with pytest.raises(WorkspaceError) as raised:
                    operations[name]()
            assert raised.value is error and (ws.timeline.refusal is error) == sticky, (name, verb)
            if sticky:
                assert not ws.usable
                with pytest.raises(DriverError, match="illegal"), ws.lease(BYTES, N=64):
                    pass


def test_without_the_note_the_next_lease_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what a query met was forgotten once."""
    ws, operations = _prepared(*SETTINGS[1])
    monkeypatch.setattr(Timeline, "call", lambda self, verb, *arguments: verb(*arguments))

    def failing(*arguments: Any) -> bool:
        raise DriverError("an illegal memory access", "restart", sticky=True)

    monkeypatch.setattr(ws.driver, "done", failing)
    with pytest.raises(DriverError):
        operations["event.query"]()
    with ws.lease(BYTES, N=64):
        assert ws.usable


def test_every_verb_that_asks_the_device_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one operation at least: the operations above are all there are."""
    names = _prepared(*SETTINGS[0])[1]
    assert set().union(*(_met(monkeypatch, one, name) for one in SETTINGS for name in names)) == set(ASKS)
