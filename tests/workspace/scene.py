"""A workspace on a device of addresses, and the layout most tests lease."""

from __future__ import annotations

from typing import Any

import torch

import workspace
from workspace import Layout, Workspace, spec
from workspace.simulated import Device

MIB = 1 << 20
BYTES = Layout("bytes", x=spec("N", dtype=torch.uint8))
OTHER = Layout("other", y=spec("N", dtype=torch.uint8))
SLAB = 2 * MIB
"""One lease of this size fills a slab of the default granularity, so that the next one cannot lie beside it."""


def scene(
    strategy: str = "event_fenced",
    *,
    steady: bool = False,
    reserve: int = 0,
    memory: int | None = None,
    **settings: Any,
) -> tuple[Device, Workspace]:
    """A device that judges, and a workspace on it.

    `steady`: the library does not know of the judge, so that repeated leases take the steady path, which a device that
    attributes bytes to owners rules out. `reserve`: bytes reserved for `BYTES`. `memory`: bytes the device has.
    """
    device = Device(memory="virtual", capacity=memory)
    device.driver().attributes = not steady
    made = workspace.create(strategy, device=device, **settings)
    if reserve:
        made.declare(BYTES, N=reserve)
        made.reserve()
    return device, made


def host(strategy: str = "event_fenced", **settings: Any) -> tuple[Device, Workspace]:
    """The same over real bytes."""
    device = Device(memory="host")
    return device, workspace.create(strategy, device=device, **settings)


def write(device: Device, ws: Workspace, label: str, nbytes: int, stream: Any) -> int:
    """Lease on a stream, write there, release; returns the address."""
    with ws.on(stream), ws.lease(BYTES, N=nbytes) as lease:
        device.launch(label, writes=[lease.x])
        return int(lease.x.data_ptr())
