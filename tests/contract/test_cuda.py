"""The contract's column of a GPU: every scenario on real streams, and with its guard taken out.

Another allocator of PyTorch's is chosen outside: ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` or
``backend:cudaMallocAsync``.
"""

from __future__ import annotations

import os

import pytest
import torch

from workspace.testing import Cell, cells, table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TWO_DEVICES = ("j1", "j3")


def allocator() -> str:
    """PyTorch's, as the table names it."""
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        return "cudaMallocAsync"
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    return "expandable_segments" if "expandable_segments:True" in conf else "native"


def run(cell: Cell) -> None:
    exempt = table().allocators.get(allocator(), {})
    for name in (cell.scenario.name, f"{cell.scenario.name}-{cell.strategy}", str(cell)):
        if name in exempt:
            pytest.skip(exempt[name])
    if cell.scenario.name in TWO_DEVICES and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    cell.check()


@pytest.mark.parametrize("cell", cells(controls=False, driver="cuda"), ids=str)
def test_strategy_keeps_scenario(cell: Cell) -> None:
    """Right data behind real delays, and what is refused refused by name."""
    run(cell)


@pytest.mark.parametrize("cell", [cell for cell in cells(driver="cuda") if cell.seam], ids=str)
def test_scenario_fails_without_its_guard(cell: Cell) -> None:
    """The negative control: with one fence, edge or guard removed the scenario must fail as it says."""
    run(cell)
