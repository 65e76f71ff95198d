"""The tests whose subject has two forms, Python and C++, run on both; the others on the form that is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from workspace import native

BOTH = [
    pytest.param("python", id="python"),
    pytest.param("c++", id="c++", marks=pytest.mark.skipif(not native.built(), reason="the C++ form is not built")),
]


@contextmanager
def running(form: str) -> Iterator[None]:
    """Run one form for a ``with`` block."""
    before = native.form()
    native.use(form == "c++")
    try:
        yield
    finally:
        native.use(before == "C++")
