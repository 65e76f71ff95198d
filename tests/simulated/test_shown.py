"""What a device is shown is what its verdict speaks of; of nothing it does not say SAFE."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import workspace
from workspace import Layout, simulated, spec
from workspace.errors import DeviceError
from workspace.simulated import Device

PART = Layout("part", q=spec("T", dtype=torch.uint8))
STRATEGIES = ("caching", "event_fenced", "per_stream")


def racy(device: Device, strategy: str = "event_fenced", *, entered: bool = True, racing: bool = True) -> str:
    """A use on a stream that nobody declared and nothing orders, or on the acquirer's."""
    ws = workspace.create(strategy, device=device)
    side = ws.stream("side")
    with torch.inference_mode(), device if entered else nullcontext():
        with ws.lease(PART, T=64) as part:
            part.q.fill_(2)  # on the acquirer's stream, where `caching` takes the bytes
            with ws.on(side) if racing else nullcontext():
                part.q.zero_()
        with ws.lease(PART, T=64) as part:
            part.q.fill_(1)
    return device.verdict()


def test_an_immediate_device_is_not_entered() -> None:
    """It would record no operation of torch, and its verdict would speak of nothing."""
    with pytest.raises(DeviceError, match="execution='immediate'") as caught:
        racy(Device())
    assert "execution='deferred'" in caught.value.remedy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_program_is_unsafe_on_a_deferred_device(strategy: str) -> None:
    """And SAFE, with no reason against it, where the side stream is left out."""
    assert racy(Device(execution="deferred"), strategy) == "UNSAFE"
    device = Device(execution="deferred")
    assert racy(device, strategy, racing=False) == "SAFE" and device.reasons() == []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("execution", ["immediate", "deferred"])
def test_a_program_that_ran_past_the_device_is_unknown(strategy: str, execution: simulated.device.Execution) -> None:
    """`with device:` was forgotten: nothing of the race was seen, and the reason says how to show it."""
    device = Device(execution=execution)
    assert racy(device, strategy, entered=False) == "UNKNOWN" and device.races() == []
    (reason,) = device.reasons()
    assert "`with device:`" in reason and "execution='deferred'" in reason


def test_what_the_library_does_by_itself_shows_nothing_of_the_program() -> None:
    """Poison, zeroing, uploads and the replay of a graph: none needs the device to be entered."""
    device = Device(memory="virtual")
    ws = workspace.create("event_fenced", device=device, poison=True)
    main = ws.stream("main")
    ws.declare(PART, T=64)
    ws.reserve()
    with torch.no_grad(), ws.on(main):
        with ws.capture() as capture, ws.lease(PART, T=64):
            pass
        capture.graph.replay(main)
        with ws.lease(PART, T=64) as part, ws.staging("ids", 64).fill() as slot:
            slot.upload(part.q)
        ws.persistent("counters", (64,), torch.int32)
    assert device.counters["memset"] and device.counters["upload"] and device.verdict() == "UNKNOWN"


@pytest.mark.parametrize("shown", [True, False])
def test_an_operation_of_a_capture_is_shown(shown: bool) -> None:
    device = Device(memory="virtual")
    ws = workspace.create("event_fenced", device=device)
    ws.declare(PART, T=64)
    ws.reserve()
    with torch.no_grad(), ws.on(ws.stream("main")), ws.capture() as capture, ws.lease(PART, T=64) as part:
        if shown:
            device.launch("write", writes=[part.q])
    capture.graph.replay(ws.stream("main"))
    assert device.verdict() == ("SAFE" if shown else "UNKNOWN")


def test_a_new_device_is_unknown() -> None:
    """It is as a workspace on another device leaves it."""
    assert Device().verdict() == "UNKNOWN"
