"""A fork in a capture, in both forms: what the thread holds may be used in the branches, at each replay."""

from __future__ import annotations

import pytest

from tests.workspace.forms import BOTH
from tests.workspace.scene import BYTES, SLAB, scene
from workspace.capture import Capture


@pytest.mark.parametrize("form", BOTH, indirect=True)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "without keeping"])
def test_a_lease_of_a_branch_from_before_its_fork_is_the_graphs(
    monkeypatch: pytest.MonkeyPatch, form: None, kept: bool
) -> None:
    """Acquired after the capture began, on a stream that then joins it: a release returns nothing before the graph."""
    device, ws = scene(steady=True, reserve=4 * SLAB)
    main, side = ws.stream("main"), ws.stream("side")
    ws.declare(BYTES, N=256, lane="main")
    ws.reserve()
    with ws.on(main), ws.fork(side):  # the steady case from here on
        pass
    if not kept:
        monkeypatch.setattr(Capture, "keep_held", lambda capture: None)
    with ws.on(main), ws.capture() as capture:
        with ws.lease(BYTES, N=256) as own:
            with ws.on(side):
                held = ws.acquire(BYTES, N=SLAB)
                device.launch("eager", writes=[held.x])
            with ws.fork(side) as branch:
                with branch(side):
                    device.launch("captured", reads=[own.x], writes=[held.x])
    address = held.address
    held.release()
    with ws.on(side):
        others = [ws.acquire(BYTES, N=SLAB) for _ in range(4)]
    assert (address not in [other.address for other in others]) == kept
    with ws.on(main), ws.fork(side):
        pass
    capture.graph.replay(main)
    with ws.on(side):
        for other in others:
            device.launch("beside the replay", writes=[other.x])
            other.release()
    assert (device.verdict() == "SAFE") == kept
    capture.graph.release()
    assert ws.snapshot().allocated == 0
