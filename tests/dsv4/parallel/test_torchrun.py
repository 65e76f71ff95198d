"""The command line under ``torchrun``: ranks that share a model print the tokens of one, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.checkpoint import save
from dsv4.model.random_weights import RandomTensors
from dsv4.serve.build import BUILT_IN, SMALL

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow

GENERATE = "-m", "dsv4", "generate", "--prompt", "The page that a request", "--max-new-tokens", "16", "--seed", "3"
TORCHRUN = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


def printed(*arguments: str) -> str:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("given", [(), ("--temperature", "1.0"), ("--speculative", "1"), ("--micro-batches", "2")])
def test_two_ranks_print_the_tokens_of_one(given: tuple[str, ...], tmp_path: Path) -> None:
    """From a checkpoint folder, with sampling, speculation, or micro-batches."""
    config = BUILT_IN[SMALL]
    save(tmp_path, RandomTensors(config, 0), config, "transformers")
    command = *GENERATE, "--token-ids", *given
    wanted = printed(*command)
    assert len(set(wanted.split())) > 1
    assert printed(*TORCHRUN, *command, "--checkpoint", str(tmp_path)) == wanted


def test_ranks_that_cannot_share_the_model_print_why() -> None:
    """Three ranks, and four output groups."""
    done = run(*TORCHRUN[:-1], "3", *GENERATE)
    assert done.returncode != 0
    assert done.stdout == "" and "o_groups=4 is not divisible by 3 ranks" in done.stderr
    assert "raise listed" not in done.stderr
