"""Whatever the arguments of an op are, it computes or raises a typed error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.ops import Op, OpError
from dsv4.ops.argument import ANY, FLOAT
from tests.dsv4.ops.calls import arguments, forms, written
from tests.dsv4.ops.samples import OPS, WIDTH, outs, sample
from workspace import TensorSpec, WorkspaceError

NAMES = sorted(OPS)


def resized(one: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Its rows repeated, or fewer of them, along each axis."""
    for axis, size in enumerate(shape):
        if size != one.shape[axis]:
            one = one.index_select(axis, torch.arange(size) % max(1, one.shape[axis]))
    return one


def tried(op: Op, given: dict[str, Any]) -> int:
    """How many forms of a call were refused; an error of another type is the test's."""
    refused = 0
    for form in forms(op):
        try:
            form(op, given)
        except WorkspaceError:
            refused += 1
    return refused


@pytest.mark.parametrize("name", NAMES)
def test_any_dim_may_be_wrong_everywhere(name: str) -> None:
    """Sizes that agree with one another, one of them 0, one less or one more: computed or refused."""
    op, given = OPS[name], arguments(name)
    _, dims = op._bind({key: given[key] for key in op.inputs}, [given[key] for key in (*op.outs, *op.scratch)])
    passed = 0
    for dim, size in dims.items():
        for other in {0, size - 1, size + 1} - {-1}:
            bound = dims | {dim: other}
            scratch = {
                key: torch.zeros(TensorSpec(one.shape, given[key].dtype).resolve(bound)[0], dtype=given[key].dtype)
                for key, one in op.scratch.items()
            }
            sized = {
                key: resized(given[key], TensorSpec(one.shape, given[key].dtype).resolve(bound)[0])
                for key, one in op._arguments.items()
                if given[key] is not None and one.shape != ANY and key not in op.scratch
            }
            passed += not tried(op, arguments(name) | sized | scratch)
    assert passed


NONE = None, "x", b"1", [1], 1j, torch.ones(2)
ODD = {"int": (-1, 0, 1, 3, 2**31), "float": (-1.0, 0.0, 1e300, -1e300, math.nan, math.inf), "bool": (True, False)}
UNLIKE = {"int": (1.5, math.nan, 2**63, -(2**63) - 1), "float": (10**400,), "bool": (1.5,)}


@pytest.mark.parametrize("name", NAMES)
def test_any_number_may_be_wrong(name: str) -> None:
    """Of another kind it is refused; of its own it is used or refused."""
    op = OPS[name]
    for _, key, kind in op._numbers:
        for value in (*NONE, *UNLIKE[kind]):
            assert tried(op, arguments(name) | {key: value}) == len(forms(op))
        for value in ODD[kind] if key != "iterations" else (-1, 0, 1):
            tried(op, arguments(name) | {key: value})


@pytest.mark.parametrize("name", NAMES)
def test_any_dtype_that_is_declared_is_taken(name: str) -> None:
    """Beside activations of each precision; another is refused."""
    op = OPS[name]
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        inputs = dict(zip(op._scalars, sample(name, dtype), strict=True))
        for key in [key for key in op.inputs if inputs[key] is not None]:
            for other in (*FLOAT, torch.uint8, torch.int32, torch.int64, torch.bool):
                given = inputs | {key: inputs[key].to(other)}
                made, scratch = outs(name, tuple(given.values()))
                refused = False
                try:
                    op(*given.values(), out=tuple(made) or None, scratch=tuple(scratch) or None)
                except WorkspaceError:
                    refused = True
                if op.inputs[key].dtype == FLOAT:
                    assert refused == (other not in FLOAT), (key, other)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tensor_is_said_by_name(name: str) -> None:
    op = OPS[name]
    for key in op.inputs:
        for other in (np.zeros((2, 3), np.float32), [1, 2], 3, "x"):
            for form in forms(op):
                with pytest.raises(OpError, match=f"{key} of {name} is {type(other).__name__}"):
                    form(op, arguments(name) | {key: other})


def test_a_number_that_is_none_is_named() -> None:
    """With what it takes."""
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(OpError, match=r"eps of rms_norm is 'x'\n.*pass a number"):
        OPS["rms_norm"](x, weight, "x")
    with pytest.raises(OpError, match=r"block_size of global_top_k is 4.0\n.*pass an integer of 64 bits"):
        OPS["global_top_k"](*sample("global_top_k")[:-1], 4.0)
    with pytest.raises(OpError, match=r"overlap of pool_states is None\n.*pass True or False"):
        OPS["pool_states"].returning(*sample("pool_states")[:-1], None, D=WIDTH)


@pytest.mark.parametrize("name", NAMES)
def test_any_index_may_be_wrong(name: str) -> None:
    """What a tensor of integers counts need not be there."""
    op = OPS[name]
    for key, one in arguments(name).items():
        if isinstance(one, torch.Tensor) and one.dtype in (torch.int32, torch.int64):
            for value in (-(2**31), -1, 10**9, 2**31 - 1):
                tried(op, arguments(name) | {key: torch.full_like(one, value)})


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda one: one.to_sparse(),
    "mkldnn": lambda one: one.to_mkldnn(),
    "nested": lambda one: torch.nested.nested_tensor([one]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_dense(name: str, kind: str) -> None:
    """Also after a call with dense ones of the same shapes and dtypes."""
    op = OPS[name]
    written(op, arguments(name))
    for key, one in arguments(name).items():
        if isinstance(one, torch.Tensor) and one.dtype is torch.float32:
            for form in forms(op) if key in op.inputs else [written]:
                with pytest.raises(OpError, match=f"{key} of {name} is .*\n.*pass a dense tensor"):
                    form(op, arguments(name) | {key: KINDS[kind](one)})
