"""What a device is shown is what its verdict speaks of."""

from __future__ import annotations

import pytest
import torch

import workspace
from workspace import Layout, spec
from workspace.errors import DeviceError
from workspace.simulated import Device

PART = Layout("part", q=spec("T", dtype=torch.uint8))


def racy(device: Device) -> str:
    """A use on a stream that nobody declared."""
    ws = workspace.create("event_fenced", device=device)
    side = ws.stream("side")
    with torch.inference_mode(), device:
        with ws.lease(PART, T=64) as part, ws.on(side):
            part.q.zero_()
        with ws.lease(PART, T=64) as part:
            part.q.fill_(1)
    return device.verdict()


def test_an_immediate_device_is_not_entered() -> None:
    """It would record no operation of torch, and its verdict would speak of nothing."""
    with pytest.raises(DeviceError, match="execution='immediate'") as caught:
        racy(Device())
    assert "execution='deferred'" in caught.value.remedy


def test_the_same_program_is_unsafe_on_a_deferred_device() -> None:
    device = Device(execution="deferred")
    assert racy(device) == "UNSAFE" and device.counters["launch"]
