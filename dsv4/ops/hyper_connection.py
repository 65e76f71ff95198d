"""Manifold-constrained hyper-connections (mHC): four residual streams around each block, and the head that ends them.

vLLM: ``vllm/model_executor/kernels/mhc/torch.py``; DeepSeek-V4 report, section 2.2.
"""

from __future__ import annotations

import torch

from dsv4.ops.argument import FLOAT, WIDE, argument
from dsv4.ops.math import normed, wide
from dsv4.ops.op import Op


def _mixes(residual: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """(x @ fn^T) * rsqrt(mean(x^2) + eps) of the flattened streams; [T, rows of fn]."""
    flat = wide(residual).flatten(1)
    return (flat @ fn.to(flat.dtype).T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + eps)


def _sinkhorn(comb: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Rows and columns normalised in turn, the columns first and last, each divisor plus eps."""
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _collapsed(streams: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """RMSNorm(sum_i pre_i R_i) * weight: the mean square before the sum is rounded to the streams' dtype."""
    total = (pre[..., None] * wide(streams)).sum(1)
    rounded = wide(total.to(streams.dtype))
    out.copy_(rounded * torch.rsqrt(total.square().mean(1, keepdim=True) + eps) * wide(weight))


def _mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
    layer_in: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
) -> None:
    """What a block reads from the streams, and the weights its output will be mixed in with.

    Parameters
    ----------
    residual
        [T, S, H], S streams.
    fn, base, scale
        [(2+S)*S, S*H], [(2+S)*S] and [3]: rows of pre, post, and comb row by row.
    norm_weight
        [H], of the block's RMSNorm, which is part of the op.
    eps, hc_eps, iterations
        Of the norms; of pre and every Sinkhorn divisor; Sinkhorn's.

    Returns
    -------
    layer_in, post, comb
        [T, H] like residual, normed; [T, S] and [T, S, S] in float32 (float64 for float64).
    """
    streams = residual.shape[1]
    mixes = _mixes(residual, fn, eps)
    parts = mixes.split((streams, streams, streams * streams), 1)
    bases = base.to(mixes.dtype).split((streams, streams, streams * streams))
    pre, posted, mixed = (
        part * factor + shift for part, factor, shift in zip(parts, scale.to(mixes.dtype), bases, strict=True)
    )
    post.copy_(2 * posted.sigmoid())
    rows = mixed.unflatten(1, (streams, streams)).softmax(-1) + hc_eps
    comb.copy_(_sinkhorn(rows, iterations, hc_eps))
    _collapsed(residual, pre.sigmoid() + hc_eps, norm_weight, eps, layer_in)


def _mhc_post(
    residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, y: torch.Tensor, mixed: torch.Tensor
) -> None:
    """R'_j = sum_i comb_ij R_i + post_j * y.

    Parameters
    ----------
    residual, post, comb
        [T, S, H], [T, S], [T, S, S].
    y
        [T, H], the block's output.

    Returns
    -------
    mixed
        [T, S, H] like residual.
    """
    mixed.copy_(torch.bmm(comb.transpose(1, 2), wide(residual)) + post[..., None] * wide(y)[:, None])


def _mhc_post_pre(
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    y: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
    mixed: torch.Tensor,
    layer_in: torch.Tensor,
    next_post: torch.Tensor,
    next_comb: torch.Tensor,
) -> None:
    """`mhc_post` of one block and `mhc_pre` of the next."""
    _mhc_post(residual, post, comb, y, mixed)
    _mhc_pre(mixed, fn, base, scale, norm_weight, eps, hc_eps, iterations, layer_in, next_post, next_comb)


def _hc_head(
    residual: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    hc_eps: float,
    hidden: torch.Tensor,
) -> None:
    """The streams summed to one, and the final norm.

    Parameters
    ----------
    residual
        [T, S, H].
    fn, base, scale
        [S, S*H], [S] and [1].
    norm_weight
        [H].

    Returns
    -------
    hidden
        [T, H] like residual.
    """
    pre = (_mixes(residual, fn, eps) * scale + base).sigmoid() + hc_eps
    total = wide((pre[..., None] * wide(residual)).sum(1).to(residual.dtype))
    hidden.copy_(normed(total, eps) * wide(norm_weight))


_STREAMS = {
    "residual": argument("T", "S", "H"),
    "post": argument("T", "S", dtype=WIDE),
    "comb": argument("T", "S", "S", dtype=WIDE),
    "y": argument("T", "H"),
}
_MIXING = {
    "fn": argument("(2+S)*S", "S*H", dtype=FLOAT),
    "base": argument("(2+S)*S", dtype=FLOAT),
    "scale": argument(3, dtype=FLOAT),
    "norm_weight": argument("H", dtype=FLOAT),
}
_MIXED = {"mixed": argument("T", "S", "H")}
_PRE = {
    "layer_in": argument("T", "H"),
    "post": argument("T", "S", dtype=WIDE),
    "comb": argument("T", "S", "S", dtype=WIDE),
}

mhc_pre = Op(
    "mhc_pre(Tensor residual, Tensor fn, Tensor base, Tensor scale, Tensor norm_weight, float eps, float hc_eps, "
    "int iterations, Tensor(a!) layer_in, Tensor(b!) post, Tensor(c!) comb) -> ()",
    _mhc_pre,
    inputs={"residual": _STREAMS["residual"], **_MIXING},
    outs=_PRE,
)
mhc_post = Op(
    "mhc_post(Tensor residual, Tensor post, Tensor comb, Tensor y, Tensor(a!) mixed) -> ()",
    _mhc_post,
    inputs=_STREAMS,
    outs=_MIXED,
)
mhc_post_pre = Op(
    "mhc_post_pre(Tensor residual, Tensor post, Tensor comb, Tensor y, Tensor fn, Tensor base, Tensor scale, "
    "Tensor norm_weight, float eps, float hc_eps, int iterations, Tensor(a!) mixed, Tensor(b!) layer_in, "
    "Tensor(c!) next_post, Tensor(d!) next_comb) -> ()",
    _mhc_post_pre,
    inputs=_STREAMS | _MIXING,
    outs={
        **_MIXED,
        "layer_in": _PRE["layer_in"],
        "next_post": _PRE["post"],
        "next_comb": _PRE["comb"],
    },
)
hc_head = Op(
    "hc_head(Tensor residual, Tensor fn, Tensor base, Tensor scale, Tensor norm_weight, float eps, float hc_eps, "
    "Tensor(a!) hidden) -> ()",
    _hc_head,
    inputs={
        "residual": _STREAMS["residual"],
        "fn": argument("S", "S*H", dtype=FLOAT),
        "base": argument("S", dtype=FLOAT),
        "scale": argument(1, dtype=FLOAT),
        "norm_weight": argument("H", dtype=FLOAT),
    },
    outs={"hidden": argument("T", "H")},
)
