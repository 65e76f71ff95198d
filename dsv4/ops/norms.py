"""RMSNorm of the query latent and of the KV in one op (vLLM ``fused_q_kv_rmsnorm``)."""

from __future__ import annotations

import torch

from dsv4.ops.argument import FLOAT, argument
from dsv4.ops.math import normed, wide
from dsv4.ops.op import Op


def _q_kv_rmsnorm(
    qr_kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    qr: torch.Tensor,
    kv: torch.Tensor,
) -> None:
    """RMSNorm with weights of the first Q and the last D columns of qr_kv; one rounding at the end.

    Parameters
    ----------
    qr_kv
        [T, Q+D].
    q_weight, kv_weight
        [Q] and [D], of any float dtype.
    eps
        Added to the mean square.

    Returns
    -------
    qr, kv
        [T, Q] and [T, D], like qr_kv.
    """
    first, second = wide(qr_kv).split((q_weight.shape[0], kv_weight.shape[0]), 1)
    qr.copy_(normed(first, eps) * wide(q_weight))
    kv.copy_(normed(second, eps) * wide(kv_weight))


q_kv_rmsnorm = Op(
    "q_kv_rmsnorm(Tensor qr_kv, Tensor q_weight, Tensor kv_weight, float eps, Tensor(a!) qr, Tensor(b!) kv) -> ()",
    _q_kv_rmsnorm,
    inputs={
        "qr_kv": argument("T", "Q+D"),
        "q_weight": argument("Q", dtype=FLOAT),
        "kv_weight": argument("D", dtype=FLOAT),
    },
    outs={"qr": argument("T", "Q"), "kv": argument("T", "D")},
)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor) -> None:
    """RMSNorm over the last dim, one rounding at the end.

    Parameters
    ----------
    x
        [N, H].
    weight
        [H].

    Returns
    -------
    y
        [N, H] like x.
    """
    y.copy_(normed(wide(x), eps) * wide(weight))


rms_norm = Op(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) y) -> ()",
    _rms_norm,
    inputs={"x": argument("N", "H"), "weight": argument("H", dtype=FLOAT)},
    outs={"y": argument("N", "H")},
)
