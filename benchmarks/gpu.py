"""The GPU that some benchmarks need: a refusal in two lines where there is none, and what its driver says of it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import torch

SMI = "nvidia-smi"


def require() -> None:
    """Exit with status 2 where nothing could be measured, before anything is written."""
    if not torch.cuda.is_available():
        _refuse(
            f"PyTorch {torch.__version__} sees no CUDA device",
            "run on a machine with an NVIDIA GPU and a CUDA build of PyTorch; `python -m benchmarks` measures on a CPU",
        )
    if shutil.which(SMI) is None:
        _refuse(
            f"{SMI!r} is not on the PATH: it names the driver that figures were taken with",
            "add the folder of the NVIDIA driver's programs to PATH",
        )


def _refuse(problem: str, remedy: str) -> None:
    print(f"Error: {problem}\nRemedy: {remedy}", file=sys.stderr)
    raise SystemExit(2)


def said(*fields: str) -> list[str]:
    """Fields of the first GPU, such as ``name`` and ``driver_version``, as the driver has them."""
    command = [SMI, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(", ")
