"""``python -m examples.porting [cuda]``: the layer before and after, what strategies hold, what the checker says.

Without an argument it runs on the CPU: the simulated device. docs/porting.md goes through it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

import workspace
from examples.porting.after import After, Unjoined
from examples.porting.before import HIDDEN, Before, Weights, angles
from examples.porting.serving import Graphed, micro_batches, reserve, run
from workspace import WorkspaceError, simulated

TOKENS, LAYERS = 64, 2
STRATEGIES = ("caching", "event_fenced", "per_stream")
CPU = torch.device("cpu")
DEFAULT = 0
"""The default stream's key."""


def placed(name: str) -> torch.device:
    """The device of that name; a typed error where there is none."""
    workspace.create("caching", device=name).close()
    return torch.device(name)


def weights(device: torch.device) -> list[Weights]:
    return [Weights(seed, device) for seed in range(LAYERS)]


def tokens(count: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)).to(device)


def layers(kind: type[After], ws: workspace.Workspace, device: torch.device, batch: str = "") -> list[After]:
    return [kind(own, ws, place, batch) for place, own in enumerate(weights(device))]


def before(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    hidden, turns = x.clone(), angles(len(x), device)
    for own in weights(device):
        Before(own, device).forward(hidden, turns)
    return hidden


def after(strategy: str, device: torch.device, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The numbers and what the workspace held at the most."""
    ws = workspace.create(strategy, device=device, statistics=True)
    reserve(ws, len(x))
    found = run(ws, layers(After, ws, device), x)
    return found, ws.snapshot()


def checked(kind: type[After]) -> tuple[torch.Tensor, simulated.Device]:
    """The layers on simulated streams, each access judged; the side stream runs only when nothing else can."""
    judge = simulated.Device(execution="deferred", sites=True, schedule=simulated.StreamFirst(DEFAULT))
    ws = workspace.create("event_fenced", device=judge)
    with judge:
        found = run(ws, layers(kind, ws, CPU), tokens(TOKENS, CPU))
        ws.synchronize()
    return found, judge


def served(device: torch.device, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A graph with eager breaks, and two micro-batches; on the CPU their streams are simulated."""
    judge = simulated.Device(execution="deferred", seed=1)
    with judge if device.type == "cpu" else nullcontext(device) as place:
        ws = workspace.create("event_fenced", device=place, micro_batches=2)
        reserve(ws, len(x), lanes=(None, "graphs"))
        with ws.slot(lane="graphs"):
            step = Graphed(ws, layers(After, ws, device), len(x), device)
        found = step.run(x)
        ws.synchronize()
        yield f"graph of {step.graph.segments} segments", found
        halves = [layers(After, ws, device, batch=f"_{index}") for index in range(2)]
        found = micro_batches(ws, halves, torch.cat((x, x)))
        ws.synchronize()
        yield "micro-batches", found[: len(x)]


def main(name: str = "cpu") -> None:
    device = placed(name)
    x = tokens(TOKENS, device)
    expected = before(device, x)

    def difference(found: torch.Tensor) -> str:
        return f"largest difference {(found - expected).abs().max().item():.3g}"

    for strategy in STRATEGIES:
        found, held = after(strategy, device, x)
        print(f"{strategy:14}{difference(found)}, {held.peak_allocated:,} bytes on lease, {held.reserved:,} reserved")
    for what, found in served(device, x):
        print(f"{what}: {difference(found)}")
    if device.type == "cuda":
        return
    for kind in (After, Unjoined):
        found, judge = checked(kind)
        print(f"{kind.__name__}: {judge.verdict()}, {difference(found)}")
    print(judge.races()[0])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit("usage: python -m examples.porting [cuda]")
    try:
        with torch.inference_mode():
            main(*sys.argv[1:])
    except WorkspaceError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
