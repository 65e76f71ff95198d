"""Products of a few rows on a GPU: near float64, each row on its own, the rest left to cuBLAS."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4.model.linear import linear, linear_grouped, linear_wide
from dsv4.ops import kernels
from dsv4.ops.errors import OpError

SHAPES = ((4096, 2048), (1024, 32768), (8192, 4096), (4096, 64), (4096, 8), (512, 4096), (8, 3), (264, 1030))
"""Depth and columns: of the model's weights, and some that no tile divides."""

ROWS = (1, 2, 3, 4, 5, 8)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)


def few(*given: Any) -> bool:
    found: bool = kernels.FAST["few_linear"](*given)
    return found


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within the rounding of what is kept, and of the sum, beside the largest of its row."""
    step = 2.0**-8 if found.dtype is torch.bfloat16 else 2.0**-20
    largest = wanted.abs().amax(-1, keepdim=True)
    return bool(((found.double() - wanted).abs() <= step * wanted.abs() + 1e-5 * largest).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_numbers(rows: int, shape: tuple[int, int]) -> None:
    """In bfloat16 and in float32, and added to what is there."""
    depth, columns = shape
    x, weight = noise(rows, depth), noise(columns, depth, seed=1).T
    wanted = x.double() @ weight.double()
    made = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert few(x, weight, False, made) and near(made, wanted)
    wide = torch.full((rows, columns), float("nan"), device="cuda")
    assert few(x, weight, False, wide) and near(wide, wanted)
    added = noise(rows, columns, seed=2)
    wanted = wanted + added.double()
    assert few(x, weight, True, added) and near(added, wanted)


@pytest.mark.parametrize("rows", ROWS)
def test_groups(rows: int) -> None:
    x, weight = noise(8, rows, 4096), noise(8, 1024, 4096, seed=1).transpose(1, 2)
    out = torch.full((rows, 8, 1024), float("nan"), device="cuda", dtype=torch.bfloat16)
    linear_grouped(x, weight, out)
    assert near(out, torch.bmm(x.double(), weight.double()).transpose(0, 1))


@pytest.mark.parametrize("rows", (*ROWS, 9))
def test_rows_of_two_dims(rows: int) -> None:
    """Heads of a query, groups of an output: as if they were flat."""
    x, weight = noise(rows, 8, 1024), noise(4096, 8192, seed=1).T
    flat = linear(x.flatten(1), weight, torch.empty(rows, 4096, device="cuda", dtype=torch.bfloat16))
    assert torch.equal(linear(x, weight, torch.empty_like(flat)), flat)
    heads = linear(x, weight, torch.empty(rows, 8, 512, device="cuda", dtype=torch.bfloat16))
    assert torch.equal(heads.flatten(1), flat) and near(flat, x.flatten(1).double() @ weight.double())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_those_beside_it(shape: tuple[int, int]) -> None:
    depth, columns = shape
    x, weight = noise(8, depth), noise(columns, depth, seed=1).T
    whole = linear(x, weight, torch.empty(8, columns, device="cuda", dtype=torch.bfloat16))
    for rows in ROWS:
        part = linear(x[-rows:], weight, torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16))
        assert torch.equal(part, whole[-rows:])


def test_more_rows_are_left_to_others() -> None:
    """And other dtypes; what the model calls computes them all the same."""
    x, weight = noise(9, 256), noise(128, 256, seed=1).T
    out = torch.full((9, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert not few(x, weight, False, out) and out.isnan().all()
    assert near(linear(x, weight, out), x.double() @ weight.double())
    assert near(linear_wide(x, weight, torch.empty(9, 128, device="cuda")), x.double() @ weight.double())
    assert not few(x.float(), weight.float(), False, out.float())


def test_weights_lie_column_by_column() -> None:
    """Control: rows that are contiguous would be read as columns, and are refused."""
    x, out = noise(2, 128), torch.empty(2, 128, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(OpError, match="weight of few_linear is not contiguous"):
        few(x, noise(128, 128), False, out)
    with pytest.raises(OpError, match="weight of few_linear has shape"):
        few(x, noise(128, 64).T, False, out)
    with pytest.raises(OpError, match="shares bytes"):
        few(out, noise(128, 128).T, False, out)


def test_an_empty_product_launches_nothing() -> None:
    assert few(noise(0, 64), noise(32, 64).T, False, torch.empty(0, 32, device="cuda", dtype=torch.bfloat16))
