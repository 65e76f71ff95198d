"""Builds csrc/dsv4's eager face with kernels for the host: what calls, allocates and counts is what CUDA's has."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).parent
SOURCES = HERE.parents[3] / "csrc" / "dsv4"
FACE = "fast", "arguments", "allocated", "returned", "modes", "reader", "table"


def built(folder: Path) -> ModuleType:
    """The extension, in that folder."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    torch_path, target = Path(torch.__file__).parent, folder / "_kernels.abi3.so"
    includes = (HERE, SOURCES, torch_path / "include", sysconfig.get_path("include"))
    command = [compiler, "-shared", "-std=c++20", "-O1", "-fPIC", "-DDSV4_ON_CPU", "-DPy_LIMITED_API=0x030b0000"]
    command += [f"-I{one}" for one in includes]
    command += [str(SOURCES / f"{one}.cpp") for one in FACE]
    command += [str(HERE / "kernels.cpp"), f"-L{torch_path / 'lib'}", "-ltorch_cpu", "-ldl", "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("_kernels", target)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
