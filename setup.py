"""Builds the CUDA kernels beside the Python package, where nvcc and a CUDA build of PyTorch are there.

pip install --no-build-isolation .        kernels included (an isolated build has no PyTorch to build against)
python setup.py build_ext --inplace       for a checkout
DSV4_KERNELS=require ...                  fail, naming what is missing, instead of leaving the kernels out
DSV4_CUDA_ARCHS="80 90a"                  compute capabilities to compile for
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
SOURCES = sorted(one for one in (ROOT / "csrc" / "dsv4").iterdir() if one.suffix in (".cpp", ".cu"))
ARCHS = os.environ.get("DSV4_CUDA_ARCHS", "80 90a").split()
FLAGS = ["-std=c++20", "-O3", "-DUSE_CUDA", "-DPy_LIMITED_API=0x030b0000", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


def nvcc() -> str | None:
    """The compiler on the path, or of CUDA_HOME."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def torch_folder() -> Path | None:
    """Where PyTorch lies."""
    try:
        import torch
    except ImportError:
        return None
    return Path(torch.__file__).parent


def missing() -> str:
    """What keeps the kernels from being built; empty when nothing does."""
    if nvcc() is None:
        return "nvcc was not found: install the CUDA toolkit, or set CUDA_HOME"
    if torch_folder() is None:
        return "PyTorch cannot be imported by the build: pass --no-build-isolation to pip"
    import torch

    if torch.version.cuda is None and os.environ.get("DSV4_KERNELS") != "require":
        return f"PyTorch {torch.__version__} is a build without CUDA"
    return ""


class BuildKernels(build_ext):
    """nvcc for every source, then one link against libtorch, whose CUDA part is only looked up when loaded."""

    def build_extension(self, ext: Extension) -> None:
        torch_path, objects = torch_folder(), Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        includes = [f"{torch_path}/include", sysconfig.get_path("include")]
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
        compile_ = [nvcc(), *FLAGS, *targets, *(f"-I{path}" for path in includes), "-c"]
        made = [objects / f"{source.name}.o" for source in SOURCES]
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            list(
                pool.map(
                    _run, ([*compile_, str(source), "-o", str(to)] for source, to in zip(SOURCES, made, strict=True))
                )
            )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # libtorch loads the CUDA part where there is one; its stream look-up is not in the CPU one.
        libraries = [f"-L{torch_path}/lib", "-Xlinker", "--no-as-needed", "-ltorch", "-cudart", "shared"]
        _run([nvcc(), "-shared", *map(str, made), *libraries, "-o", str(target)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}\nthe CUDA kernels do not build; see the error above")


reason = missing() if os.environ.get("DSV4_KERNELS") != "off" else "DSV4_KERNELS is off"
if reason and os.environ.get("DSV4_KERNELS") == "require":
    raise SystemExit(f"the CUDA kernels cannot be built: {reason}")
if reason:
    print(f"workspace is built without the CUDA kernels: {reason}", file=sys.stderr)
kernels = Extension("dsv4._kernels", [str(one.relative_to(ROOT)) for one in SOURCES], py_limited_api=True)
setup(ext_modules=[] if reason else [kernels], cmdclass={"build_ext": BuildKernels})
