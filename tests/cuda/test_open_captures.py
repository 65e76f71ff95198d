"""What a thread may do while it has a capture open: capture on another stream, and let go of graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import workspace
from workspace import Layout, Workspace, spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BYTES = Layout("bytes", x=spec("N", dtype=torch.uint8))


@pytest.fixture
def ws() -> Iterator[Workspace]:
    with torch.no_grad():
        made = workspace.create("event_fenced", device="cuda")
        for lane in ("outer", "inner"):
            made.declare(BYTES, N=4096, lane=lane)
        made.reserve()
        yield made


def test_two_captures_at_once(ws: Workspace) -> None:
    """Begun and ended inside another of the same thread, on another stream: both graphs are whole."""
    one, two = ws.stream("one"), ws.stream("two")
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    ws.synchronize()
    with ws.on(one), ws.capture(lane="outer") as outer:
        x.add_(1)
        with ws.on(two), ws.capture(lane="inner") as inner, ws.lease(BYTES, N=4096) as lease:
            lease.x.fill_(1)
            y.add_(1)
        x.add_(1)
    for _ in range(3):
        outer.graph.replay(one)
        inner.graph.replay(two)
    ws.synchronize()
    assert x[0].item() == 6 and y[0].item() == 3
    outer.graph.release()
    inner.graph.release()
    ws.close()


@pytest.mark.parametrize("failing", [False, True])
def test_a_graph_is_released_inside_a_capture(ws: Workspace, failing: bool) -> None:
    """It is destroyed after it, and so is what a failed capture left; the bytes come back."""
    one, two = ws.stream("one"), ws.stream("two")
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    ws.synchronize()
    with ws.on(two), ws.capture(lane="inner") as inner, ws.lease(BYTES, N=4096) as lease:
        lease.x.fill_(1)
    with ws.on(one), ws.capture(lane="outer") as outer:
        x.add_(1)
        inner.graph.release()
        if failing:
            with pytest.raises(KeyError), ws.on(two), ws.capture(lane="inner"):
                y.add_(1)
                raise KeyError
        x.add_(1)
    outer.graph.replay(one)
    ws.synchronize()
    assert x[0].item() == 2
    outer.graph.release()
    ws.close()
