"""What lies here needs a CUDA device and the built kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dsv4.ops import kernels


def _why_not() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return kernels.MISSING


CACHED = 1 << 30
"""Bytes that PyTorch's allocator may keep from test to test: many processes share the device."""


@pytest.fixture(autouse=True)
def kernels_there() -> Iterator[None]:
    reason = _why_not()
    if reason:
        pytest.skip(reason)
    yield
    if torch.cuda.memory_reserved() > CACHED:
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/dsv4/cuda/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
