"""Scenario a6 on NCCL: a lease given to an asynchronous all-reduce between two GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.dsv4.parallel.spawned import port

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def wrong_sums(how: str) -> int:
    """How many numbers rank 1 was left with that are not the sum."""
    command = [sys.executable, "-m", "tests.cuda.collective"]
    with port() as place:
        ranks = [
            subprocess.Popen([*command, str(rank), str(place), how], cwd=ROOT, stdout=-1, stderr=-1, text=True)
            for rank in range(2)
        ]
        outputs = [one.communicate(timeout=120) for one in ranks]
    assert not any(one.returncode for one in ranks), [errors[-2000:] for _, errors in outputs]
    return int(outputs[1][0].split()[-1])


def test_a_lease_is_released_through_the_work() -> None:
    assert wrong_sums("until") == 0


def test_a_lease_released_before_the_work_is_done_is_overwritten() -> None:
    """Control: the same without `until`."""
    assert wrong_sums("early") > 0
