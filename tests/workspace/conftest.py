"""Fixtures of the core's tests: scratch is leased outside autograd, as model code leases it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    with torch.no_grad():
        yield
