"""A device that says late that a graph is gone: what is destroyed is waited for, what lives is not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.cuda.retaining import Retaining
from tests.workspace.scene import BYTES, MIB, scene
from workspace.cuda import releases
from workspace.errors import LockError
from workspace.workspace import Workspace


def late(ws: Workspace) -> list[Callable[[], None]]:
    """Have the driver keep its notices until `settle`; returns those it keeps."""
    driver: Any = ws.driver
    kept: list[Callable[[], None]] = []
    register = driver.on_graph_release

    def settle() -> None:
        while kept:
            kept.pop()()

    driver.on_graph_release = lambda graph, callback: register(graph, lambda: kept.append(callback))
    driver.settle = settle
    return kept


def captured(ws: Workspace, device: Any) -> Any:
    with ws.on(ws.stream("main")), ws.capture() as capture:
        with ws.lease(BYTES, N=100) as lease:
            device.launch("captured", writes=[lease.x])
    return capture.graph


@pytest.mark.parametrize("call", ["close", "unlock"])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_graph_that_is_being_destroyed_is_waited_for(call: str, dropped: bool) -> None:
    """Released or dropped a moment ago: it holds nothing any more that anybody could use."""
    device, ws = scene(reserve=MIB)
    kept = late(ws)
    graph = captured(ws, device)
    ws.lock()
    if not dropped:
        graph.release()
    del graph
    gc.collect()
    assert kept and ws.snapshot().footprints
    getattr(ws, call)()
    assert ws.snapshot().footprints == {} and ws.closed == (call == "close")


@pytest.mark.parametrize("call", ["close", "unlock"])
def test_without_the_wait_it_is_refused(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The control: what CUDA did before."""
    device, ws = scene(reserve=MIB)
    late(ws)
    graph = captured(ws, device)
    graph.release()
    monkeypatch.setattr(Workspace, "_await_graphs", lambda self: None)
    with pytest.raises(LockError, match="1 graphs exist"):
        getattr(ws, call)()


def test_a_graph_that_lives_is_refused_as_before() -> None:
    """Whatever else is being destroyed."""
    device, ws = scene(reserve=MIB)
    late(ws)
    one, other = captured(ws, device), captured(ws, device)
    one.release()
    with pytest.raises(LockError, match="while 1 graphs exist\n"):
        ws.close()
    with ws.lease(BYTES, N=MIB), pytest.raises(LockError, match="while 1 graphs exist and [0-9]+ bytes are on lease"):
        ws.close()
    other.release()
    ws.close()


def test_an_owner_that_shares_the_pool_waits_for_nothing() -> None:
    """The graphs are the workspace's."""
    device, ws = scene(reserve=MIB)
    kept = late(ws)
    owner = ws.owner("draft")
    captured(ws, device).release()
    owner.close()
    assert kept and owner.closed
    ws.close()


def test_cudas_notice_is_awaited_from_another_thread() -> None:
    """The semaphore is posted while the host waits; a graph whose end is not under way is not waited for."""
    lib: Any = Retaining()
    watched = releases.Releases(lib)
    first, second = watched.watch(1), watched.watch(2)
    watched.settle()
    first.ending = True
    posting = threading.Timer(0.05, lib.destructors[0])
    posting.start()
    watched.settle()
    posting.join()
    assert first.over and not second.over and not watched.ending


def test_a_notice_that_never_comes_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused then is refused as before."""
    lib: Any = Retaining()
    watched = releases.Releases(lib)
    release = watched.watch(1)
    release.ending = True
    monkeypatch.setattr(releases, "MOMENTS", 0.01)
    watched.settle()
    assert not release.over and watched.ending
