"""The same layer on the interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import workspace
from examples.porting.before import (
    EXPERTS,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    WIDTH,
    Weights,
    attention,
    rms_norm,
    route,
    swiglu,
)
from workspace import Slot, spec

F32 = torch.float32
STEP = workspace.Layout("step", hidden=spec("T", HIDDEN, dtype=F32))
ATTENTION = workspace.Layout(
    "attention",
    normed=spec("T", HIDDEN, dtype=F32),
    qkv=spec("T", (HEADS + 2 * KV_HEADS) * WIDTH, dtype=F32),
    o=spec("T", HEADS * WIDTH, dtype=F32),
    projected=spec("T", HIDDEN, dtype=F32),
)
MIXTURE = workspace.Layout(
    "mixture",
    normed=spec("T", HIDDEN, dtype=F32),
    shared_gate_up=spec("T", 2 * INNER, dtype=F32),
    shared_act=spec("T", INNER, dtype=F32),
    shared=spec("T", HIDDEN, dtype=F32),
    logits=spec("T", EXPERTS, dtype=F32),
    share=spec("T", EXPERTS, dtype=F32),
    gate_up=spec(EXPERTS, "T", 2 * INNER, dtype=F32),
    act=spec(EXPERTS, "T", INNER, dtype=F32),
    down=spec(EXPERTS, "T", HIDDEN, dtype=F32),
    routed=spec("T", 1, HIDDEN, dtype=F32),
)


def into(out: torch.Tensor | Slot, value: torch.Tensor) -> torch.Tensor:
    """What an op without an out form of its own does with ``out=``."""
    return out.fill(value) if isinstance(out, Slot) else out.copy_(value)


class After:
    def __init__(self, weights: Weights, ws: workspace.Workspace, place: int, batch: str = "") -> None:
        self.w, self.ws = weights, ws
        self.side = ws.stream("side" + batch)
        self.load = ws.persistent(f"expert_load_{place}{batch}", (EXPERTS,), F32)

    def forward(self, hidden: Any, turns: torch.Tensor, apart: Callable[..., Any] = lambda fn: fn()) -> None:
        self.attend(hidden, turns, apart)
        self.mix(hidden)

    def attend(self, hidden: Any, turns: torch.Tensor, apart: Callable[..., Any]) -> None:
        w = self.w
        with self.ws.lease(ATTENTION, T=len(hidden)) as s:
            into(s.normed, rms_norm(hidden, w.attention_norm))
            torch.mm(s.normed, w.qkv, out=s.qkv)
            qkv, o = s.qkv[:], s.o[:]  # tensors, not the lease: an eager break uses them at each replay
            apart(lambda: o.copy_(attention(qkv, turns)))
            hidden.add_(torch.mm(s.o, w.out, out=s.projected))

    def mix(self, hidden: Any) -> None:
        with self.ws.lease(MIXTURE, T=len(hidden)) as s:
            into(s.normed, rms_norm(hidden, self.w.expert_norm))
            self.experts(s)
            hidden.add_(s.shared).add_(s.routed[:, 0])
            self.load.add_((s.share > 0).sum(0))

    def experts(self, s: Any) -> None:
        with self.ws.fork(self.side) as branch:
            with branch(self.side):
                self.shared_expert(s)
            self.routed_experts(s)

    def shared_expert(self, s: Any) -> None:
        torch.mm(s.normed, self.w.shared_in, out=s.shared_gate_up)
        into(s.shared_act, swiglu(s.shared_gate_up))
        torch.mm(s.shared_act, self.w.shared_out, out=s.shared)

    def routed_experts(self, s: Any) -> None:
        torch.mm(s.normed, self.w.router, out=s.logits)
        into(s.share, route(s.logits))
        torch.bmm(s.normed.expand(EXPERTS, -1, -1), self.w.experts_in, out=s.gate_up)
        into(s.act, swiglu(s.gate_up))
        torch.bmm(s.act, self.w.experts_out, out=s.down)
        torch.bmm(s.share[:, None], s.down.transpose(0, 1), out=s.routed)


class Unjoined(After):
    """Ported by hand, event by event, and the way back forgotten."""

    def experts(self, s: Any) -> None:
        ready = self.ws.event()
        ready.record()
        ready.wait(self.side)
        with self.ws.on(self.side):
            self.shared_expert(s)
        self.routed_experts(s)
