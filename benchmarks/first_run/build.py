"""Builds the extension of csrc/bench on the machine that measures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

_SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "bench"


def build() -> tuple[Any, float]:
    """The extension module, and the seconds it took to build."""
    from torch.utils import cpp_extension

    started = time.perf_counter()
    module = cpp_extension.load(
        name="calling",
        sources=[str(_SOURCES / name) for name in ("empty_kernel.cu", "boxed.cpp", "unboxed.cpp")],
        extra_cuda_cflags=["-gencode=arch=compute_90,code=sm_90"],
    )
    return module, time.perf_counter() - started
