"""The library's own objects are left out of collections, which scenarios ask for often."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def frozen() -> Iterator[None]:
    """Collections look at what a test made, not at torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
