"""What the parts cost the host: a stage's lease, a fence, a fork and join, a replay of a broken graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import workspace
from benchmarks.decode_step.model import flash
from dsv4.config import LayerKind
from dsv4.model.precision import SERVED
from dsv4.model.scratch import stage_layouts
from dsv4.shard import Shard

BATCHES, CALLS = 41, 200
SEGMENTS = 44
WHOLE = 2 << 20
"""Bytes of a slab: a lease of them leaves no other block to take."""

SMALL = workspace.Layout("small", x=workspace.spec("N", dtype=torch.uint8))


def measure() -> dict[str, Any]:
    """Every figure with its samples; us of one call, by batch, the compared ones in turn."""
    with torch.no_grad():
        return {
            "stage": {name: stage(name) for name in ("event_fenced", "per_stream", "unfenced", "upstream")},
            "fence": fence(),
            "fork": fork(),
            "replay": replay(),
        }


def _batches(bodies: dict[str, Callable[[], object]], calls: int = CALLS) -> dict[str, list[float]]:
    for body in bodies.values():
        for _ in range(20):
            body()
    taken: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(BATCHES):
        for name, body in bodies.items():
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            for _ in range(calls):
                body()
            taken[name].append((time.perf_counter_ns() - began) / 1e3 / calls)
    torch.cuda.synchronize()
    return taken


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(over, under, strict=True))


def _found(us: dict[str, list[float]], **ratios: float) -> dict[str, Any]:
    medians = {name: round(statistics.median(values), 3) for name, values in us.items()}
    return {"us": medians, **ratios, "samples": {name: [round(one, 3) for one in own] for name, own in us.items()}}


def stage(strategy: str) -> dict[str, Any]:
    """A C4 layer's preparation at two tokens: acquire, read the tensors, release; and the same from torch.empty."""
    ws = workspace.create(strategy, device="cuda", allow_unsafe=True)
    layout = stage_layouts(Shard(flash(3), attention="flashinfer"), SERVED, LayerKind.C4)["preparation"]
    shapes = [(one.shape, one.dtype) for one in layout.resolve(T=2).extents]
    names = [one.name for one in layout.resolve(T=2).extents]
    read = eval(
        f"lambda s: ({', '.join('s.' + name for name in names)},)"
    )  # attributes by name, as an op's call has them

    def lease() -> None:
        with ws.lease(layout, T=2) as scratch:
            read(scratch)

    def lazily() -> None:  # a slot is allocated when an op asks for its tensor
        with ws.lease(layout, T=2) as scratch:
            for one in read(scratch):
                one.tensor()

    def bare() -> None:
        with ws.lease(layout, T=2):
            pass

    def empty() -> None:
        for shape, dtype in shapes:
            torch.empty(shape, dtype=dtype, device="cuda")

    body = lease if ws.provider.lends_tensors else lazily
    us = _batches({"lease, tensors read": body, "lease": bare, "torch.empty": empty})
    ws.close()
    return {"tensors": len(shapes)} | _found(
        us,
        over_empty=_ratio(us["lease, tensors read"], us["torch.empty"]),
        unread_over_empty=_ratio(us["lease"], us["torch.empty"]),
    )


def fence() -> dict[str, Any]:
    """A block that two streams take in turn, with nothing that orders them: a fence each; its calls; and none."""
    ws = workspace.create("event_fenced", device="cuda", policy="fence")
    ws.declare(SMALL, N=WHOLE)
    ws.reserve()
    one, other = ws.stream("one"), ws.stream("other")
    timeline, driver = ws.timeline, ws.driver
    event = driver.new_event()

    def leased(stream: Any) -> None:
        driver.set_stream(stream.key)
        with ws.lease(SMALL, N=WHOLE) as scratch:
            scratch.x  # noqa: B018  (an op's argument)

    def fenced() -> None:
        leased(one)
        leased(other)

    def unfenced() -> None:
        leased(one)
        leased(one)

    def calls() -> None:
        for stream, waiter in ((one, other), (other, one)):
            driver.set_stream(waiter.key)
            driver.record(event, stream.key)
            driver.wait(event, waiter.key)

    def switch() -> None:  # which each of the others holds, so that the parts hold it twice
        driver.set_stream(other.key)
        driver.set_stream(one.key)

    before = timeline.fences
    with ws.on(one):
        us = _batches({"fenced": fenced, "unfenced": unfenced, "record and wait": calls, "switch": switch}, 100)
        driver.set_stream(one.key)
    made = timeline.fences - before
    halves = {name: [value / 2 for value in values] for name, values in us.items()}
    sums = [a + b for a, b in zip(halves["unfenced"], halves["record and wait"], strict=True)]
    once = [both - switched for both, switched in zip(sums, halves["switch"], strict=True)]
    driver.free_event(event)
    ws.close()
    ratios = {"over_its_parts": _ratio(halves["fenced"], sums), "switched_once": _ratio(halves["fenced"], once)}
    return {"fences": made} | _found(halves, **ratios)


def fork() -> dict[str, Any]:
    """Three branches with nothing on them."""
    ws = workspace.create("event_fenced", device="cuda")
    streams = [ws.stream(f"branch{index}") for index in range(3)]
    others = [torch.cuda.ExternalStream(stream.key) for stream in streams]
    events = [torch.cuda.Event() for _ in range(4)]

    def own() -> None:
        with ws.fork(*streams) as branch:
            for stream in streams:
                with branch(stream):
                    pass

    def usual() -> None:
        parent = torch.cuda.current_stream()
        events[0].record(parent)
        for event, stream in zip(events[1:], others, strict=True):
            stream.wait_event(events[0])
            with torch.cuda.stream(stream):
                pass
            event.record(stream)
        for event in events[1:]:
            parent.wait_event(event)

    with ws.on(ws.stream("main")):
        us = _batches({"ws.fork": own, "usual idiom": usual})
    ws.close()
    return _found(us, over_idiom=_ratio(us["ws.fork"], us["usual idiom"]))


def replay() -> dict[str, Any]:
    """A graph of 44 segments with breaks that do nothing, and its segments replayed one by one."""
    ws = workspace.create("event_fenced", device="cuda")
    ws.declare(SMALL, N=1024, lane="main")
    ws.reserve()
    tensor = torch.zeros(1024, dtype=torch.uint8, device="cuda")

    def nothing() -> None:
        pass

    with ws.on(ws.stream("main")):
        ws.synchronize()
        with ws.capture(lane="main") as capture:
            with ws.lease(SMALL, N=1024) as scratch:
                for segment in range(SEGMENTS):
                    scratch.x.copy_(tensor)
                    if segment < SEGMENTS - 1:
                        capture.eager_break(nothing)
        graph = capture.graph
        segments: list[Any] = [one for one in graph._segments if not callable(one)]
        raw = [one.raw for one in segments]

        def singly() -> None:
            for one in raw:
                one.replay()
                nothing()

        us = _batches({"library": graph.replay, "raw replays": singly}, 20)
        graph.release()
    ws.synchronize()
    ws.close()
    return {"segments": len(raw)} | _found(us, over_raw=_ratio(us["library"], us["raw replays"]))
