"""The attention output rotated back and laid out by output group, plain or in FP8.

vLLM: ``fused_inv_rope_fp8_quant``.
"""

from __future__ import annotations

import torch

from dsv4.cache.quantise import fp8_exponent, to_fp8
from dsv4.ops.argument import F32, FLOAT, FP8, I64, argument
from dsv4.ops.math import rotated, wide
from dsv4.ops.op import Op
from dsv4.ops.rules import Call, rotation

BLOCK = 128


def _grouped(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """[G, T, heads/G * D], without the padding heads."""
    back = rotated(wide(o[:, :heads]), cos_sin[positions], inverse=True)
    return back.unflatten(1, (groups, -1)).flatten(2).transpose(0, 1)


def _inverse_rope(
    o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, heads: int, grouped: torch.Tensor
) -> None:
    """RoPE undone, heads grouped.

    Parameters
    ----------
    o
        [T, P, D].
    positions
        int64 [T].
    cos_sin
        [*, R].
    heads
        Heads that are not padding.

    Returns
    -------
    grouped
        [G, T, heads/G * D] like o.
    """
    grouped.copy_(_grouped(o, positions, cos_sin, heads, grouped.shape[0]))


def _inverse_rope_fp8(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    heads: int,
    grouped: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """As `inverse_rope`, quantised without a rounding in between: FP8 per 128 with power-of-two scales.

    Returns
    -------
    grouped, scales
        float8_e4m3fn [G, T, N]; float32 [G, N/128, T rounded up to 4], token by token along the last dim, 0 in the
        padding (the layout of SM90's FP8 GEMMs).
    """
    blocks = _grouped(o, positions, cos_sin, heads, grouped.shape[0]).unflatten(2, (-1, BLOCK))
    power = fp8_exponent(blocks.abs().amax(3), floor=1e-10)
    grouped.copy_(to_fp8(blocks, power[..., None]).flatten(2))
    scales.zero_()
    scales[..., : o.shape[0]] = torch.ldexp(torch.ones_like(power, dtype=torch.float32), power).transpose(1, 2)


def _rules(call: Call) -> None:
    (_, padded, width), heads = call["o"].shape, call["heads"]
    groups, _, columns = call["grouped"].shape
    rotation(call, width)
    call.require(0 < heads <= padded, "heads", f"is {heads}", "pass at most o's heads")
    shape = f"pass [G, T, heads / G * {width}]"
    call.require(groups > 0 and heads % groups == 0, "grouped", "does not divide the heads", shape)
    call.require(heads // groups * width == columns, "grouped", "has another width", shape)


def _fp8_rules(call: Call) -> None:
    _rules(call)
    columns = call["grouped"].shape[2]
    call.require(columns % BLOCK == 0, "grouped", f"has {columns} columns", f"pass a multiple of {BLOCK}")


_INPUTS = {
    "o": argument("T", "P", "D"),
    "positions": argument("T", dtype=I64),
    "cos_sin": argument("L", "R", dtype=FLOAT),
}

inverse_rope = Op(
    "inverse_rope(Tensor o, Tensor positions, Tensor cos_sin, int heads, Tensor(a!) grouped) -> ()",
    _inverse_rope,
    inputs=_INPUTS,
    outs={"grouped": argument("G", "T", "N")},
    rules=_rules,
)
inverse_rope_fp8 = Op(
    "inverse_rope_fp8(Tensor o, Tensor positions, Tensor cos_sin, int heads, Tensor(a!) grouped, Tensor(b!) scales) "
    "-> ()",
    _inverse_rope_fp8,
    inputs=_INPUTS,
    outs={
        "grouped": argument("G", "T", "N", dtype=FP8),
        "scales": argument("G", f"N//{BLOCK}", "(T+3)//4*4", dtype=F32),
    },
    rules=_fp8_rules,
)
