"""The indexer's queries: RoPE, quantisation, and the head weights with every scale folded in.

vLLM: ``common/ops/fused_indexer_q.py``, ``nvidia/ops/fused_indexer_q_cutedsl.py``.
"""

from __future__ import annotations

import torch

from dsv4.cache.quantise import fp8_exponent, quantise_fp4, to_fp8
from dsv4.ops.argument import FLOAT, FP8, I64, LIKE, U8, WIDE, argument
from dsv4.ops.math import rotated, wide
from dsv4.ops.op import Op
from dsv4.ops.rules import Call, rotation

INPUTS = {
    "q": argument("T", "H", "D"),
    "weights": argument("T", "H", dtype=LIKE),
    "positions": argument("T", dtype=I64),
    "cos_sin": argument("L", "R", dtype=FLOAT),
}


def _indexer_q_rope(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    scale: float,
    q_out: torch.Tensor,
    weights_out: torch.Tensor,
) -> None:
    """Unquantised: the queries rotated, the weights times the scale.

    Parameters
    ----------
    q
        [T, H, D].
    weights
        [T, H], one weight a head.
    positions
        int64 [T].
    cos_sin
        [*, R]; the tail of R dims is rotated.
    scale
        D**-0.5 * H**-0.5, folded into the weights.

    Returns
    -------
    q_out, weights_out
        [T, H, D] like q, and [T, H] in float32 (float64 for float64).
    """
    q_out.copy_(rotated(wide(q), cos_sin[positions]))
    weights_out.copy_(wide(weights) * scale)


def _indexer_q_rope_fp8(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    scale: float,
    q_out: torch.Tensor,
    weights_out: torch.Tensor,
) -> None:
    """FP8: rotated and rounded to bf16, then one power-of-two scale per (token, head), folded into its weight.

    Inputs as for `indexer_q_rope`.

    Returns
    -------
    q_out, weights_out
        float8_e4m3fn [T, H, D]; [T, H], weights * query scale * scale.
    """
    rows = rotated(wide(q), cos_sin[positions]).to(torch.bfloat16).float()
    power = fp8_exponent(rows.abs().amax(-1))
    q_out.copy_(to_fp8(rows, power[..., None]))
    weights_out.copy_(torch.ldexp(wide(weights), power) * scale)


def _indexer_q_rope_fp4(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    scale: float,
    q_out: torch.Tensor,
    scales_out: torch.Tensor,
    weights_out: torch.Tensor,
) -> None:
    """MXFP4: rotated and rounded to bf16, then E2M1 with UE8M0 scales per 32, which stay apart from the weights.

    Inputs as for `indexer_q_rope`.

    Returns
    -------
    q_out, scales_out, weights_out
        uint8 [T, H, D/2], the even element in the low nibble; uint8 [T, H, D/32]; [T, H], weights * scale.
    """
    rows = rotated(wide(q), cos_sin[positions]).to(torch.bfloat16).float()
    packed, scales = quantise_fp4(rows)
    q_out.copy_(packed)
    scales_out.copy_(scales)
    weights_out.copy_(wide(weights) * scale)


def _rules(call: Call) -> None:
    rotation(call, call["q"].shape[2])


def _fp4_rules(call: Call) -> None:
    _rules(call)
    width = call["q"].shape[2]
    call.require(width % 32 == 0, "q", f"has heads {width} wide", "pass a multiple of 32, the dims of a scale")


_SCHEMA = "(Tensor q, Tensor weights, Tensor positions, Tensor cos_sin, float scale, Tensor(a!) q_out, "

indexer_q_rope = Op(
    f"indexer_q_rope{_SCHEMA}Tensor(b!) weights_out) -> ()",
    _indexer_q_rope,
    inputs=INPUTS,
    outs={"q_out": argument("T", "H", "D"), "weights_out": argument("T", "H", dtype=WIDE)},
    rules=_rules,
)
indexer_q_rope_fp8 = Op(
    f"indexer_q_rope_fp8{_SCHEMA}Tensor(b!) weights_out) -> ()",
    _indexer_q_rope_fp8,
    inputs=INPUTS,
    outs={"q_out": argument("T", "H", "D", dtype=FP8), "weights_out": argument("T", "H", dtype=WIDE)},
    rules=_rules,
)
indexer_q_rope_fp4 = Op(
    f"indexer_q_rope_fp4{_SCHEMA}Tensor(b!) scales_out, Tensor(c!) weights_out) -> ()",
    _indexer_q_rope_fp4,
    inputs=INPUTS,
    outs={
        "q_out": argument("T", "H", "D//2", dtype=U8),
        "scales_out": argument("T", "H", "D//32", dtype=U8),
        "weights_out": argument("T", "H", dtype=WIDE),
    },
    rules=_fp4_rules,
)
