"""Peak bytes on loan over the trace: Flash, eager, one micro-batch, virtual memory at true sizes.

The largest sum of live leases is counted in front of the workspace, from the sizes of the layouts alone.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.figure import Figure
from benchmarks.replay import open_workspace, session_and_steps
from workspace import simulated

STEPS = 400
MIB = 1 << 20


def figures() -> list[Figure]:
    """All figures of this benchmark."""
    with torch.no_grad():
        fenced, _ = _peaks("event_fenced", True)
        per_stream, _ = _peaks("per_stream", True)
        alone, live = _peaks("event_fenced", False)
    return [
        Figure("side streams: event_fenced / per_stream, peak on loan", fenced / per_stream, "ratio", 1.0),
        Figure("side streams: event_fenced, peak on loan", fenced / MIB, "MiB"),
        Figure("side streams: per_stream, peak on loan", per_stream / MIB, "MiB"),
        Figure("no side streams: event_fenced / largest sum of live leases", alone / live, "ratio", 1.05),
        Figure("no side streams: event_fenced, peak on loan", alone / MIB, "MiB"),
        Figure("no side streams: largest sum of live leases", live / MIB, "MiB"),
    ]


class Ledger:
    """Stands in front of a workspace and sums the bytes of live leases."""

    def __init__(self, ws: Any) -> None:
        self._ws = ws
        self.live = self.peak = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ws, name)

    def lease(self, layout: Any, /, **dims: int) -> CountedLease:
        """As `Workspace.lease`."""
        return CountedLease(self, self._ws.lease(layout, **dims), layout.size(**dims))


class CountedLease:
    """A lease whose bytes the ledger counts from enter to exit."""

    def __init__(self, ledger: Ledger, lease: Any, nbytes: int) -> None:
        self._ledger, self._lease, self._nbytes = ledger, lease, nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lease, name)

    def __enter__(self) -> CountedLease:
        self._lease.__enter__()
        ledger = self._ledger
        ledger.live += self._nbytes
        ledger.peak = max(ledger.peak, ledger.live)
        return self

    def __exit__(self, *error: Any) -> None:
        self._lease.__exit__(*error)
        self._ledger.live -= self._nbytes

    def release(self) -> None:
        """As `Lease.release`."""
        self._lease.release()
        self._ledger.live -= self._nbytes


def _peaks(strategy: str, aux_streams: bool) -> tuple[int, int]:
    """Peak bytes on loan, and the largest sum of live leases."""
    session, steps = session_and_steps(STEPS)
    device = simulated.Device(memory="virtual", log=False)
    ledger = Ledger(open_workspace(strategy, device, statistics=True))
    runner = session.prepare(ledger, "eager", aux_streams, 1)
    for step in steps:
        runner.run(step)
    peak = ledger.snapshot().peak_allocated
    runner.close()
    return peak, ledger.peak
