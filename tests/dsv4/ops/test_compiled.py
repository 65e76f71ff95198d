"""Ops in compiled code are one graph, and compute what they do in eager code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.dsv4.ops.samples import OPS, outs, sample


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
