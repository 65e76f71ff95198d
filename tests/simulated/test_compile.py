"""Compiled functions inside ``with device:``: Dynamo compiles what the caller wrote, and none of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

import workspace
from workspace.simulated import Device

PAIR = workspace.Layout("pair", **{name: workspace.spec("N", dtype=torch.float32) for name in "xy"})
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "elementwise": lambda a, b: (a * 2 + 1).add(b),
    "in place": lambda a, b: torch.add(a.mul_(2).view(-1, 1).t().reshape(-1), b, out=b),
    "reads": lambda a, b: a * b.sum().item() if a.sum() > 0 else b,
}
SIZES = 5, 64, 16, 3, 64, 100, 8, 5, 16
"""Among them more than Dynamo recompiles a frame for."""


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(compiled: Function, strategy: str, seed: int, size: int, racy: bool) -> tuple[str, list[float]]:
    device = Device(execution="deferred", seed=seed)
    ws = workspace.create(strategy, device=device)
    with torch.inference_mode(), device:
        with ws.lease(PAIR, N=size) as lease:
            x, y = lease.allocate("x", "y")
            y.fill_(1)
            with ws.on(ws.stream("side")) if racy else nullcontext():
                x.fill_(seed)
            found = compiled(x, y).tolist()
    return device.verdict(), found


@pytest.mark.parametrize("strategy", ("caching", "event_fenced"))
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_function_is_judged_as_it_is(name: str, backend: str, strategy: str) -> None:
    """Results and verdicts, and no error of a device that was compiled with it."""
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend=backend)
    for seed, size in enumerate(SIZES, start=1):
        wanted = function(torch.full((size,), float(seed)), torch.ones(size)).tolist()
        assert run(compiled, strategy, seed, size, racy=False) == ("SAFE", wanted)
        assert run(compiled, strategy, seed, size, racy=True)[0] == "UNSAFE"
