"""The workspace of a cell."""

from __future__ import annotations

from typing import Any

import attrs

import workspace
from workspace.config import load_config
from workspace.sweep.plan import Cell


def workspace_of(cell: Cell, device: Any, allow_unsafe: bool, statistics: bool) -> Any:
    """A workspace with the user's settings, but for those that tell cells apart."""
    config = attrs.evolve(
        load_config().config,
        strategy=cell.strategy,
        allow_unsafe=allow_unsafe,
        micro_batches=cell.micro_batches,
        statistics=statistics,
    )
    return workspace.create(device=device, config=config)
