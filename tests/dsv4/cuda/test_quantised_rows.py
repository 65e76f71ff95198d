"""Quantised queries and outputs where their kernels have edges: every value near a scale, rows and heads left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.kernels.calls import call
from benchmarks.kernels.maker import BF16, Call, Maker, made
from dsv4 import ops
from tests.dsv4.cuda.check import check

HEADS: list[dict[str, Any]] = [
    {"heads": 1, "padded": 1, "groups": 1},
    {"heads": 3, "padded": 5, "groups": 3},
    {"heads": 15, "padded": 16, "groups": 5},
    {"heads": 64, "padded": 64, "groups": 8},
]


@pytest.mark.parametrize("how", HEADS, ids=lambda one: f"{one['heads']} of {one['padded']}")
@pytest.mark.parametrize("rows", [63, 64, 65, 66, 71, 129])
@pytest.mark.parametrize("name", ["inverse_rope", "inverse_rope_fp8"])
def test_outputs_of_any_number_of_rows_and_heads(name: str, rows: int, how: dict[str, Any]) -> None:
    """Around the number of rows from which a warp takes several; tokens and heads that fill no warp."""
    check(call(name, rows, **how))


def every_value_near(power: int) -> torch.Tensor:
    """Blocks of 32 whose scale is 2**power, with every bf16 value up to 6 scales that is not far below half of one."""
    exponents = torch.arange(-5, 3, dtype=torch.float64)[:, None]
    sizes = (2**exponents * (1 + torch.arange(128) / 128)).flatten()
    values = torch.cat((sizes[sizes <= 6], -sizes[sizes <= 6], torch.zeros(1), -torch.zeros(1)))
    blocks = torch.cat((values, values[: -len(values) % 31])).view(-1, 31)
    blocks = torch.cat((blocks, torch.full((len(blocks), 1), 6.0)), 1)
    blocks = torch.cat((blocks, blocks[: -len(blocks) % 4]))  # whole rows of four blocks
    return (blocks * 2.0**power).to(BF16)


@pytest.mark.parametrize("power", [-126, -120, -1, 0, 40, 125])
def test_fp4_codes_of_every_value(power: int) -> None:
    """The kernel rounds by sums; midpoints, signs of zero and what is next to a midpoint included."""
    q = every_value_near(power).view(1, -1, 128).to("cuda")
    m = Maker("cuda", 0, "random")
    positions = torch.zeros(1, dtype=torch.int64, device="cuda")  # turned by nothing
    given = (q, m.plain(*q.shape[:2], dtype=BF16), positions, m.cos_sin(), 0.5)
    fp4: Call = made(ops.indexer_q_rope_fp4, given)
    check(fp4)
    assert (fp4.outs[1] == power + 127).all()
