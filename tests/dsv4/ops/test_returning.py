"""The returning form of every op: new outs, of the sizes that inputs and dims tell, written by the same kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4.ops import OpError
from tests.dsv4.ops.samples import DIMS, OPS, outs, sample

NAMES = [name for name in sorted(OPS) if OPS[name].outs]


def dims_of(name: str) -> dict[str, Any]:
    """What the inputs of the sample do not tell."""
    told = DIMS.get(name, {}) | {"dtype": torch.float32}
    return {dim: told[dim] for dim in OPS[name].untold}


def listed(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", NAMES)
def test_it_returns_what_the_out_form_writes(name: str) -> None:
    op = OPS[name]
    made, scratch = outs(name, sample(name))
    op(*sample(name), out=made, scratch=scratch or None)
    for _ in range(2):  # the second finds the sizes remembered
        found = listed(op.returning(*sample(name), **dims_of(name)))
        assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in made]
        for argument, one, other in zip(op.outs.values(), found, made, strict=True):
            assert argument.partly or one.view(torch.uint8).equal(other.view(torch.uint8))


@pytest.mark.parametrize("name", [name for name in NAMES if not OPS[name].untold])
def test_it_is_what_a_call_without_outs_is(name: str) -> None:
    one, other = OPS[name](*sample(name)), OPS[name].returning(*sample(name))
    assert all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in zip(listed(one), listed(other), strict=True))


def test_other_sizes_are_other_results() -> None:
    """Nothing of one call's sizes is left for the next."""
    x, weight = torch.randn(9, 32), torch.ones(32)
    assert [OPS["rms_norm"].returning(x[:rows], weight, 1e-6).shape[0] for rows in (9, 2, 9, 0)] == [9, 2, 9, 0]
    assert OPS["rms_norm"].returning(x.bfloat16(), weight, 1e-6).dtype is torch.bfloat16


def test_dims_that_are_missing_or_too_many_are_named() -> None:
    top = sample("indexer_top_k")
    for dims in ({}, {"K": 4, "P": 8}, {"P": 8}):
        with pytest.raises(OpError, match="returning form of indexer_top_k was given.*") as refused:
            OPS["indexer_top_k"].returning(*top, **dims)
        assert "pass its dims: K" in str(refused.value)


def test_wrong_inputs_are_refused_as_in_the_out_form() -> None:
    x, weight = torch.randn(3, 32), torch.ones(32)
    for inputs, says in (
        ((x, weight), "takes 3 inputs"),
        ((None, weight, 1e-6), "is None"),
        ((x[0], weight, 1e-6), "has shape"),
    ):
        with pytest.raises(OpError, match=says):
            OPS["rms_norm"].returning(*inputs)


def test_sizes_may_be_symbols() -> None:
    """A graph traced at one size is right at another; nothing of a symbol is remembered."""
    op = OPS["q_kv_rmsnorm"]
    x, *weights, eps = sample(op.name)
    known = dict(op._results._known)
    graph = make_fx(lambda *tensors: op.returning(*tensors, eps), tracing_mode="symbolic")(x, *weights)
    assert op._results._known == known
    longer = torch.cat([x, 2 * x])
    wanted = op(longer, *weights, eps)
    assert all(one.equal(other) for one, other in zip(graph(longer, *weights), wanted, strict=True))
