"""The layer as somebody else wrote it: grouped-query attention, and experts of which one, shared, has a side stream.

Shapes: T tokens of one prompt. Every intermediate is a fresh tensor of the framework's allocator.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

HIDDEN, HEADS, KV_HEADS, WIDTH = 256, 4, 2, 64
EXPERTS, TOP_K, INNER = 8, 2, 256
EPS, THETA = 1e-6, 10000.0


class Weights:
    """Of one layer, random by seed; matrices are [in, out]."""

    def __init__(self, seed: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-2] ** -0.5).to(device)

        self.attention_norm = torch.ones(HIDDEN, device=device)
        self.qkv = matrix(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH)
        self.out = matrix(HEADS * WIDTH, HIDDEN)
        self.expert_norm = torch.ones(HIDDEN, device=device)
        self.router = matrix(HIDDEN, EXPERTS)
        self.shared_in, self.shared_out = matrix(HIDDEN, 2 * INNER), matrix(INNER, HIDDEN)
        self.experts_in, self.experts_out = matrix(EXPERTS, HIDDEN, 2 * INNER), matrix(EXPERTS, INNER, HIDDEN)


def angles(tokens: int, device: torch.device) -> torch.Tensor:
    """RoPE angles [T, WIDTH/2]."""
    pairs = THETA ** -(torch.arange(0, WIDTH, 2, device=device) / WIDTH)
    return torch.arange(tokens, device=device)[:, None] * pairs


def rotated(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """RoPE on [T, heads, WIDTH]."""
    cos, sin = turns.cos()[:, None], turns.sin()[:, None]
    first, second = x.chunk(2, 2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), 2)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


def attention(qkv: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.view(len(qkv), -1, WIDTH).split((HEADS, KV_HEADS, KV_HEADS), 1)
    q, k, v = (one.transpose(0, 1) for one in (rotated(q, turns), rotated(k, turns), v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)


def route(logits: torch.Tensor) -> torch.Tensor:
    """Each expert's share in a token, [T, E]: the softmax of the best TOP_K, 0 for the others."""
    best, chosen = logits.topk(TOP_K, 1)
    return torch.zeros_like(logits).scatter(1, chosen, best.softmax(1))


class Before:
    def __init__(self, weights: Weights, device: torch.device) -> None:
        self.w = weights
        self.load = torch.zeros(EXPERTS, device=device)  # tokens each expert has had, for balancing
        self.streams = torch.get_device_module(device)
        self.side = self.streams.Stream()

    def forward(self, hidden: torch.Tensor, turns: torch.Tensor) -> None:
        w = self.w
        normed = rms_norm(hidden, w.attention_norm)
        o = attention(torch.mm(normed, w.qkv), turns)
        hidden.add_(torch.mm(o, w.out))

        normed = rms_norm(hidden, w.expert_norm)
        main = self.streams.current_stream()
        self.side.wait_stream(main)
        with self.streams.stream(self.side):
            shared = torch.mm(swiglu(torch.mm(normed, w.shared_in)), w.shared_out)
        share = route(torch.mm(normed, w.router))
        act = swiglu(torch.bmm(normed.expand(EXPERTS, -1, -1), w.experts_in))
        down = torch.bmm(act, w.experts_out)  # every expert sees every token, so that a graph can hold it
        routed = torch.bmm(share[:, None], down.transpose(0, 1))[:, 0]
        main.wait_stream(self.side)
        hidden.add_(shared).add_(routed)
        self.load.add_((share > 0).sum(0))
