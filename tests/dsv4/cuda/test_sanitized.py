"""compute-sanitizer over every kernel at small sizes: ``make sanitize``. Slow, and left out unless asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("memcheck", "initcheck", "racecheck")
NOT_FOLLOWED = ("sparse_attention", "mhc_pre 17", "mhc_pre 800", "mhc_post_pre 17", "mhc_post_pre 800")
"""What racecheck leaves out: calls whose warps hand each other bytes through a barrier at which one lane arrives for
its warp, which it does not follow (`test_racecheck_does_not_follow_an_arrival_for_a_warp`). Calls, not only their
kernel: left out by name, the kernel ends in an error inside the tool."""

FOUND = 9
"""Exit status of the tool when it has found something; what else goes wrong exits with another."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not there"),
]


def sanitized(tool: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a tool over our kernels. Each tensor has an allocation of its own, with no slack."""
    left_out = [f"-{call}" for call in NOT_FOLLOWED] if tool == "racecheck" else []
    command = [
        "compute-sanitizer", "--tool", tool, "--kernel-name", "kns=dsv4", "--error-exitcode", str(FOUND),
        "--target-processes", "application-only", sys.executable, "-m", "tests.dsv4.cuda.sanitized", *arguments,
        *left_out,
    ]  # fmt: skip
    scope = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    done = subprocess.run(command, cwd=ROOT, env=scope, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_found(tool: str) -> None:
    """No access outside its tensor, no read of what nobody wrote, no race in shared memory."""
    status, output = sanitized(tool)
    print(f"{tool}, exit status {status}:", *output.splitlines()[-4:], sep="\n")
    assert status == 0, output[-6000:]
    assert " calls\n" in output


def test_racecheck_does_not_follow_an_arrival_for_a_warp() -> None:
    """A race is told of a kernel that has none: once none is, nothing need be left out any more."""
    status, output = sanitized("racecheck", "arrival")
    assert status == FOUND, output[-3000:]
    assert "dsv4_planted" in output


def test_initcheck_does_not_follow_the_copying_unit() -> None:
    """What it wrote is taken for unwritten: once it is not, no out need be written before."""
    status, output = sanitized("initcheck", "copied out")
    assert status == FOUND, output[-3000:]
    assert "Uninitialized access" in output and "by cudaMemcpy source" in output


@pytest.mark.parametrize("tool", TOOLS)
def test_a_planted_fault_is_found(tool: str) -> None:
    """Control: one kernel with the fault that the tool is for."""
    status, output = sanitized(tool, tool)
    assert status == FOUND, output[-3000:]
    assert "dsv4_planted" in output
