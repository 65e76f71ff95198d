"""What stands around the layers: sizes, a graph with eager breaks, micro-batches, and work that nobody joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import workspace
from examples.porting.after import ATTENTION, MIXTURE, STEP, After
from examples.porting.before import HIDDEN, angles


def run(ws: workspace.Workspace, layers: Sequence[After], x: torch.Tensor) -> torch.Tensor:
    """All layers on the current stream; [T, H], a tensor of the framework's own."""
    turns = angles(len(x), x.device)
    with ws.lease(STEP, T=len(x)) as step:
        step.hidden.copy_(x)
        for layer in layers:
            layer.forward(step.hidden, turns)
        return step.hidden.clone()  # what outlives the lease is no scratch


def reserve(ws: workspace.Workspace, most: int, lanes: Sequence[str | None] = (None,)) -> int:
    """Hold the bytes of steps of up to `most` tokens, eager (None) and in each lane of graphs, and no more."""
    for lane in lanes:
        ws.declare(STEP, T=most, lane=lane)
        ws.declare(ATTENTION, T=most, phase="attention", lane=lane)
        ws.declare(MIXTURE, T=most, phase="mixture", lane=lane)
    nbytes = ws.reserve()
    ws.lock()
    return nbytes


class Graphed:
    """A step of T tokens as one graph, broken around attention, whose kernels the host chooses anew each time."""

    def __init__(self, ws: workspace.Workspace, layers: Sequence[After], tokens: int, device: torch.device) -> None:
        self.ws, self.main = ws, ws.stream("main")
        self.hidden = ws.persistent("graph_hidden", (tokens, HIDDEN), torch.float32)  # the address a graph reads
        turns = angles(tokens, device)
        ws.synchronize()
        with ws.on(self.main), ws.capture() as capture:
            for layer in layers:
                layer.forward(self.hidden, turns, capture.eager_break)
        self.graph = capture.graph

    def run(self, x: torch.Tensor) -> torch.Tensor:
        with self.ws.on(self.main):
            self.hidden.copy_(x)
            self.graph.replay()
            return self.hidden.clone()


def micro_batches(ws: workspace.Workspace, halves: Sequence[Sequence[After]], x: torch.Tensor) -> torch.Tensor:
    """Two halves of a batch, layer by layer in turns, each on streams and in a slot of its own."""
    mains = [ws.stream(f"main{index}") for index in range(len(halves))]
    parts = [part.clone() for part in x.chunk(len(halves))]
    turns = [angles(len(part), x.device) for part in parts]
    ready = ws.event()
    ready.record()
    for main in mains:
        ready.wait(main)
    for place in range(len(halves[0])):
        for index, layers in enumerate(halves):
            with ws.slot(micro_batch=index), ws.on(mains[index]):
                layers[place].forward(parts[index], turns[index])
    for main in mains:
        done = ws.event()
        done.record(main)
        done.wait()
    return torch.cat(parts)


def offload(ws: workspace.Workspace, x: torch.Tensor, host: torch.Tensor, declared: bool = True) -> None:
    """Copy scratch on a stream that this one does not wait for; it is lent again only behind the copy."""
    copies = ws.stream("copies")
    with ws.lease(STEP, T=len(x)) as step:
        torch.mul(x, 2, out=step.hidden)
        made = ws.event()
        made.record()
        made.wait(copies)
        with ws.on(copies):
            host.copy_(step.hidden, non_blocking=True)
        if declared:
            ws.use(step.hidden, copies)


def reduced(ws: workspace.Workspace, layer: After, x: torch.Tensor, group: Any) -> torch.Tensor:
    """A tensor-parallel sum that runs beside other work."""
    with ws.lease(STEP, T=len(x)) as step:
        torch.mm(x, layer.w.router.new_ones(HIDDEN, HIDDEN), out=step.hidden)
        work = torch.distributed.all_reduce(step.hidden, group=group, async_op=True)
        ws.until(work)  # whatever happens below, the bytes are lent again only behind the sum
        y = x.square()
        work.wait()
        return y.add_(step.hidden)
