"""Ranks in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]

RANKS = 2


@contextmanager
def port() -> Iterator[int]:
    """A free one, which nobody else is given until the ranks have taken it: that takes them seconds."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store's: it may listen there
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def spawned(folder: Path, device: str, ranks: int = RANKS) -> list[dict[str, Any]]:
    """What each rank of `tests.dsv4.parallel.worker` found. It computes in float32, which the kernels do not take."""
    processes = []
    with port() as place:
        for rank in range(ranks):
            own = {"WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
            own |= {"MASTER_PORT": place, "OMP_NUM_THREADS": 1, "DSV4_KERNELS": "off"}
            environment = os.environ | {name: str(value) for name, value in own.items()}
            command = [sys.executable, "-m", "tests.dsv4.parallel.worker", str(folder), device]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
        for one in processes:
            errors = one.communicate(timeout=240)[1]
            assert one.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(ranks)]
