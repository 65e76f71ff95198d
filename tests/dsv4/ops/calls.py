"""Calls of the ops' samples with every argument by name, in both forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4.ops import Op
from tests.dsv4.ops.samples import OPS, outs, sample

Given = dict[str, Any]
Form = Callable[[Op, Given], None]


def arguments(name: str) -> Given:
    """Everything of a call by name, outs and scratch too."""
    inputs = sample(name)
    made, scratch = outs(name, inputs)
    return dict(zip(OPS[name]._names, (*inputs, *made, *scratch), strict=True))


def written(op: Op, given: Given) -> None:
    """A call in out form."""
    inputs = [given[name] for name in op._scalars]
    made, scratch = (tuple(given[name] for name in names) or None for names in (op.outs, op.scratch))
    op(*inputs, out=made, scratch=scratch)


def returned(op: Op, given: Given) -> None:
    """The same call in returning form."""
    told = {dim: given[name].shape[axis] for name, one in (op.outs | op.scratch).items() for axis, dim in one.names}
    first = given[next(iter(op.outs))].dtype if op.outs else None
    op.returning(*[given[name] for name in op._scalars], **{dim: (told | {"dtype": first})[dim] for dim in op.untold})


def forms(op: Op) -> list[Form]:
    return [written, returned] if op.outs else [written]
