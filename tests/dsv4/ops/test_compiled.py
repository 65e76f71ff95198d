"""Ops in compiled code are one graph, and compute what they do in eager code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.dsv4.ops.samples import DIMS, OPS, outs, sample


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What was compiled before counts towards no limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_does_not_break_the_graph(name: str) -> None:
    """Nor do its outs, read by what is compiled beside it."""
    op = OPS[name]

    def function(inputs: Any, made: Any, scratch: Any) -> list[torch.Tensor]:
        op(*inputs, out=made or None, scratch=scratch or None)
        return [one + one for one in made if one.dtype.itemsize > 1]

    run = torch.compile(function, backend="aot_eager", fullgraph=True)
    wanted, found = ((sample(name), *outs(name, sample(name))) for _ in range(2))
    for one, other in zip(function(*wanted), run(*found), strict=True):
        assert one.equal(other)
    for one, other in zip(wanted[1], found[1], strict=True):
        assert one.view(torch.uint8).equal(other.view(torch.uint8))


@pytest.mark.parametrize("name", [name for name in sorted(OPS) if OPS[name].outs])
def test_the_returning_form_does_not_break_the_graph(name: str) -> None:
    """Its sizes are computed of symbols; what it returns is what the eager form does, at other sizes too."""
    op, made = OPS[name], outs(name, sample(name))[0]
    told = DIMS.get(name, {}) | {"dtype": made[0].dtype}

    def function(inputs: Any) -> Any:
        return op.returning(*inputs, **{dim: told[dim] for dim in op.untold})

    run = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    wanted, found = (one if isinstance(one, tuple) else (one,) for one in (function(sample(name)), run(sample(name))))
    for argument, one, other in zip(op.outs.values(), wanted, found, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert argument.partly or one.view(torch.uint8).equal(other.view(torch.uint8))


def test_the_returning_form_is_compiled_once_for_all_sizes() -> None:
    """As is a call without outs."""
    frames: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        frames.append(graph)
        return graph

    run = torch.compile(lambda *inputs: OPS["rms_norm"](*inputs), backend=backend, fullgraph=True, dynamic=True)
    for rows in (9, 2, 5):
        x, weight = torch.randn(rows, 32), torch.ones(32)
        assert run(x, weight, 1e-6).equal(OPS["rms_norm"](x, weight, 1e-6))
    assert len(frames) == 1
