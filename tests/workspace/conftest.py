"""Fixtures of the core's tests: scratch is leased outside autograd, as model code leases it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.workspace.forms import BOTH, running

IN_BOTH_FORMS = {
    "test_breakable", "test_capture", "test_capture_failures", "test_empty", "test_event", "test_foreign", "test_fork",
    "test_handover", "test_hostile", "test_interrupted", "test_lanes", "test_lease", "test_process", "test_ranged",
    "test_refit", "test_scratch_machine", "test_sleep", "test_slot", "test_sticky", "test_threads", "test_untold",
}  # fmt: skip
"""What the steady path in C++ takes part in; `test_native` runs everything on the Python form, too."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in IN_BOTH_FORMS:
        metafunc.parametrize("form", BOTH, indirect=True)


@pytest.fixture(autouse=True)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """The form of the steady path, where a test is run on both."""
    chosen = getattr(request, "param", None)
    if chosen is None:
        yield
    else:
        with running(chosen):
            yield


@pytest.fixture(autouse=True)
def _no_autograd() -> Iterator[None]:
    with torch.no_grad():
        yield
