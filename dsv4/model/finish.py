"""Stage E and what stands around the blocks: output projection, hyper-connections, MoE, the way in and out."""

from __future__ import annotations

from typing import Any

import torch

from dsv4 import ops
from dsv4.model.forward import Forward, Kernel
from dsv4.model.linear import linear, linear_wide
from dsv4.model.scratch import experts_layout
from dsv4.model.sizes import EXPERTS_AT_ONCE
from dsv4.topology import Op


def rotate_back(f: Forward, _: Op) -> None:
    given = f.output.o, f.meta.positions, f.layer.table, f.shard.heads
    ops.inverse_rope(*given, out=f.projection.o_grouped)


def project_groups(f: Forward, _: Op) -> None:
    torch.bmm(f.projection.o_grouped, f.layer.attention.wo_a, out=f.projection.z.transpose(0, 1))


def project(f: Forward, _: Op) -> None:
    linear(f.projection.z.flatten(1), f.layer.attention.wo_b, out=f.projection.attn_out)
    f.sum_over_ranks("projection", f.projection.attn_out)


def quantised_elsewhere(f: Forward, _: Op) -> None:
    """As in `dsv4.model.prepare`: belongs to FP8 linears."""


# -- hyper-connections -----------------------------------------------------------------------------------


def enter(f: Forward, _: Op) -> None:
    """The streams' first contents, and what the first block reads of them."""
    s = f.mhc_attn
    f.body.enter(f, s.residual)
    ops.mhc_pre(s.residual, *f.layer.into_attention, out=(s.layer_in, s.post, s.comb))


def between_blocks(f: Forward, op: Op) -> None:
    """Out of one block and into the next: which ones, the op's accesses say."""
    if op.writes[0].startswith("mhc_attn."):
        source, target, given, y = f.mhc_ffn, f.mhc_attn, f.layer.into_attention, f.summed("ffn").y
    else:
        source, target, given, y = f.mhc_attn, f.mhc_ffn, f.layer.into_ffn, f.summed("projection").attn_out
    out = target.residual, target.layer_in, target.post, target.comb
    ops.mhc_post_pre(source.residual, source.post, source.comb, y, *given, out=out)


def leave(f: Forward, _: Op) -> None:
    """Out of the last block. The results outlive the step, so they are no lease."""
    s = f.mhc_ffn
    given = s.residual, s.post, s.comb, f.summed("ffn").y
    if f.keeps_streams:
        f.residual = ops.mhc_post(*given, out=f.residual)
        _collapse(f, f.residual)
    else:
        f.acquire("last")
        _collapse(f, ops.mhc_post(*given, out=f.last.mixed))
        f.release("last")


def _collapse(f: Forward, streams: Any) -> None:
    head, eps = f.body.head, (f.config.rms_norm_eps, f.config.hc_eps)
    f.hidden = ops.hc_head(streams, head.fn, head.base, head.scale, head.norm, *eps, out=f.hidden)


# -- MoE -------------------------------------------------------------------------------------------------


def moe(f: Forward, _: Op) -> None:
    _experts(f)
    f.sum_over_ranks("ffn", f.ffn.y)


def _experts(f: Forward) -> None:
    """The routed experts and the shared one, of this rank each, so many tokens at once."""
    x, y, tokens = f.mhc_ffn.layer_in, f.ffn.y, f.meta.tokens
    if f.tokens <= EXPERTS_AT_ONCE:
        f.acquire("experts")
        _mix(f, f.experts, x, y, tokens)
        f.release("experts")
        return
    layout = experts_layout(f.shard, f.precision)
    for first in range(0, f.tokens, EXPERTS_AT_ONCE):
        rows = slice(first, min(first + EXPERTS_AT_ONCE, f.tokens))
        with f.ws.lease(layout, T=rows.stop - first) as s:
            _mix(f, s, x[rows], y[rows], tokens[rows])


def _mix(f: Forward, s: Any, x: Any, y: Any, tokens: torch.Tensor) -> None:
    own, config = f.layer.experts, f.config
    linear_wide(x, own.gate, out=s.logits)
    factor = config.routed_scaling_factor
    chosen = ops.route(s.logits, own.bias, own.table, tokens, factor, out=(s.experts, s.weights))
    _keep_own(f, chosen[0])
    scratch = s.rows, s.gate_up, s.act, s.down
    y = ops.routed_experts(x, *chosen, own.w13, own.w2, config.swiglu_limit, out=y, scratch=scratch)
    if own.shared is not None:
        linear(x, own.shared.w13, out=s.shared_gate_up)
        ops.swiglu(s.shared_gate_up, config.swiglu_limit, out=s.shared_act)
        y.addmm_(s.shared_act, own.shared.w2)


def _keep_own(f: Forward, experts: Any) -> None:
    """Number this rank's experts from 0; those of other ranks become -1."""
    if f.shard.tensor_parallel > 1:
        experts.sub_(f.shard.first_expert)
        experts.masked_fill_((experts < 0) | (experts >= f.shard.experts), -1)


KERNELS: dict[str, Kernel] = {
    "embed_mhc_pre": enter,
    "mhc_fused_post_pre": between_blocks,
    "mhc_post_hc_head": leave,
    "fused_inv_rope_fp8_quant": rotate_back,
    "fp8_einsum_wo_a": project_groups,
    "act_quant_z": quantised_elsewhere,
    "wo_b": project,
    "moe": moe,
}
