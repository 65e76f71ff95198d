"""Routing, clamped SwiGLU, and the routed experts (everything else of the MoE is a GEMM)."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch.nn.functional import softplus

from dsv4.ops import kernels
from dsv4.ops.argument import FLOAT, I32, I64, WIDE, argument
from dsv4.ops.errors import OpError
from dsv4.ops.math import wide
from dsv4.ops.op import Op
from dsv4.ops.rules import Call


def _route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    tokens: torch.Tensor,
    factor: float,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """The experts of each token and their weights, from scores s = sqrt(softplus(logits)).

    Chosen are the K highest s + bias, ties going to the lower expert, or in hash layers what the table says for the
    token. Weights are s / (sum of the chosen s) * factor; the bias never enters them.

    Parameters
    ----------
    logits
        [T, E].
    bias
        [E], or None in hash layers.
    table
        [V, K] of an integer dtype in hash layers, else None.
    tokens
        int64 [T].
    factor
        routed_scaling_factor.

    Returns
    -------
    experts, weights
        int32 [T, K]; [T, K] in float32 (float64 for float64).
    """
    scores = softplus(wide(logits)).sqrt()
    if table is None:
        ranked = scores if bias is None else scores + wide(bias)
        chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : experts.shape[1]]
    else:
        chosen = table[tokens].long()
        # On a GPU the kernel says so itself; asking it would break a capture.
        if chosen.device.type == "cpu" and bool(((chosen < 0) | (chosen >= logits.shape[1])).any()):
            raise OpError("table of route names experts that logits have not", f"pass 0 to {logits.shape[1] - 1}")
    picked = scores.gather(1, chosen)
    total = picked.sum(1, keepdim=True)
    experts.copy_(chosen)
    weights.copy_(picked * factor / torch.where(total == 0, 1, total))


def gated(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of [T, 2I]; [T, I]."""
    gate, up = wide(gate_up).chunk(2, 1)
    if abs(limit) > torch.finfo(gate.dtype).max:  # as a kernel's float32 has it
        limit = math.copysign(math.inf, limit)
    gate = gate.clamp(max=limit)
    return gate * gate.sigmoid() * up.clamp(-limit, limit)


def _swiglu(gate_up: torch.Tensor, limit: float, act: torch.Tensor) -> None:
    """silu(min(gate, limit)) * clamp(up, -limit, limit).

    Parameters
    ----------
    gate_up
        [T, 2I], the gate's columns first.

    Returns
    -------
    act
        [T, I] like gate_up.
    """
    act.copy_(gated(gate_up, limit))


def _routed_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
    y: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    act: torch.Tensor,
    down: torch.Tensor,
) -> None:
    """y = sum over a token's experts of weight * w2 swiglu(w13 x), summed in the order of its list.

    An expert below 0 is another rank's and adds nothing.

    Parameters
    ----------
    x
        [T, H].
    experts, weights
        int32 [T, K] and [T, K].
    w13, w2
        [E, 2I, H] (gate rows first) and [E, H, I].
    limit
        swiglu_limit.

    Returns
    -------
    y
        [T, H] like x.

    Notes
    -----
    Scratch: rows [T*K, H], gate_up [T*K, 2I], act [T*K, I], down [T*K, H] like x, in the experts' order.
    """
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    # Clamped first: a count has as many bins as the largest number, whatever a race has left there.
    most = w13.shape[0]
    elsewhere, *counts, beyond = torch.bincount((flat + 1).clamp(0, most + 1), minlength=most + 2).tolist()
    if beyond:
        raise OpError(f"{beyond} of {len(flat)} experts are none of the {most} there are", "pass rows of w13, or -1")
    torch.index_select(x, 0, order // experts.shape[1], out=rows)
    start = elsewhere
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            torch.mm(rows[part], w13[expert].to(x.dtype).T, out=gate_up[part])
            act[part] = gated(gate_up[part], limit).to(act.dtype)
            torch.mm(act[part], w2[expert].to(x.dtype).T, out=down[part])
            start += count
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    terms = wide(down)[places].view(*experts.shape, -1) * weights[..., None]
    if elsewhere:  # their rows were never written: what is there may be no number
        terms.masked_fill_(experts[..., None] < 0, 0)
    y.copy_(terms.sum(1))


def _grouped_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float,
    y: torch.Tensor,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    act: torch.Tensor,
    down: torch.Tensor,
) -> None:
    """`_routed_experts` on a GPU without asking it anything, so that a graph can capture it: PyTorch's grouped GEMM.

    It allocates its results itself: gate_up and down stay untouched.
    """
    given = x, experts, weights, w13, w2, limit, y, rows, gate_up, act, down
    if not _groups(x, w2):
        _routed_experts(*given)
        return
    if kernels.FAST["routed_experts"](*given):
        return
    flat = experts.flatten()
    sorted_, order = flat.sort(stable=True)
    # Experts of other ranks come first and count to the first group: what that gives for them, nobody adds up.
    ends = torch.searchsorted(sorted_, torch.arange(1, w13.shape[0] + 1, dtype=I32, device=x.device), out_int32=True)
    torch.index_select(x, 0, order // experts.shape[1], out=rows)
    swiglu(torch._grouped_mm(rows, w13.transpose(1, 2), ends), limit, out=act)
    summands = torch._grouped_mm(act, w2.transpose(1, 2), ends)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    kernels.FAST["combine_experts"](summands, places, experts, weights, y)


def _groups(x: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether the kernels and the grouped GEMM take tensors of this kind: bfloat16, rows of whole 16 bytes, sm_90."""
    return (
        "combine_experts" in kernels.FAST
        and x.dtype is torch.bfloat16 is w2.dtype
        and not (w2.shape[1] | w2.shape[2]) % 8
        and _capability(x.device) >= (9, 0)
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _route_rules(call: Call) -> None:
    chosen = call["experts"].shape[1]
    call.require(
        chosen <= call["logits"].shape[1],
        "experts",
        f"has {chosen} columns",
        "pass no more than there are experts",
    )


def _swiglu_rules(call: Call) -> None:
    both = call["gate_up"].shape[1]
    call.require(both % 2 == 0, "gate_up", f"has {both} columns", "pass gate and up of one width")


def _experts_rules(call: Call) -> None:
    chosen = call["experts"].shape[1]
    call.require(chosen > 0, "experts", f"has {chosen} columns", "pass one or more experts a token")


route = Op(
    "route(Tensor logits, Tensor? bias, Tensor? table, Tensor tokens, float factor, Tensor(a!) experts, "
    "Tensor(b!) weights) -> ()",
    _route,
    inputs={
        "logits": argument("T", "E"),
        "bias": argument("E", dtype=FLOAT, optional=True),
        "table": argument("V", "K", dtype=(I32, I64), optional=True),
        "tokens": argument("T", dtype=I64),
    },
    outs={"experts": argument("T", "K", dtype=I32), "weights": argument("T", "K", dtype=WIDE)},
    rules=_route_rules,
)
swiglu = Op(
    "swiglu(Tensor gate_up, float limit, Tensor(a!) act) -> ()",
    _swiglu,
    inputs={"gate_up": argument("T", "I2")},
    outs={"act": argument("T", "I2//2")},
    rules=_swiglu_rules,
)
routed_experts = Op(
    "routed_experts(Tensor x, Tensor experts, Tensor weights, Tensor w13, Tensor w2, float limit, Tensor(a!) y, "
    "Tensor(b!) rows, Tensor(c!) gate_up, Tensor(d!) act, Tensor(e!) down) -> ()",
    _routed_experts,
    inputs={
        "x": argument("T", "H"),
        "experts": argument("T", "K", dtype=I32),
        "weights": argument("T", "K", dtype=WIDE),
        "w13": argument("E", "2*I", "H", dtype=FLOAT),
        "w2": argument("E", "H", "I", dtype=FLOAT),
    },
    outs={"y": argument("T", "H")},
    scratch={
        "rows": argument("T*K", "H"),
        "gate_up": argument("T*K", "2*I"),
        "act": argument("T*K", "I"),
        "down": argument("T*K", "H"),
    },
    rules=_experts_rules,
    cuda=_grouped_experts,
)
