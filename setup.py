"""Builds what is not Python: the steady path in C++, where a compiler is there, and the CUDA kernels, where nvcc and a
CUDA build of PyTorch are.

`pip install .` does, and `python setup.py build_ext --inplace` for a checkout. Where something is missing the package
is built without them, and a line on stderr says what. Environment:

CXX
    The C++ compiler.
DSV4_KERNELS
    `require`: fail, naming what is missing, and build against a CPU PyTorch's headers, too. `off`: leave them out.
DSV4_CUDA_ARCHS
    Compute capabilities to compile for, by default ``80 90a``.
MAX_JOBS
    Files compiled at a time, by default one a core.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
SOURCES = sorted(one for one in (ROOT / "csrc" / "dsv4").iterdir() if one.suffix in (".cpp", ".cu"))
ARCHS = os.environ.get("DSV4_CUDA_ARCHS", "80 90a").split()
STEADY_PATH = Extension(
    "workspace._native",
    sorted(str(one.relative_to(ROOT)) for one in (ROOT / "csrc" / "workspace").glob("*.cpp")),
    depends=sorted(str(one.relative_to(ROOT)) for one in (ROOT / "csrc" / "workspace").glob("*.h")),
    extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden"],
    language="c++",
    optional=True,  # the Python form does the same
)
FLAGS = ["-std=c++20", "-O3", "-DUSE_CUDA", "-DPy_LIMITED_API=0x030b0000", "-Xcompiler", "-fPIC,-fvisibility=hidden"]


def _use_what_compiles() -> None:
    """Name the compiler that is there, where the one that built this Python is not."""
    for variable, name in (("CC", "cc"), ("CXX", "c++")):
        built_with = (sysconfig.get_config_var(variable) or name).split()[0]
        if variable not in os.environ and not shutil.which(built_with) and shutil.which(name):
            os.environ[variable] = name


def nvcc() -> str | None:
    """The compiler on the path, or of CUDA_HOME."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def torch_folder() -> Path | None:
    """Where PyTorch lies, also for pip's isolated builds, which cannot import what the environment has."""
    spec = find_spec("torch")
    found = Path(spec.origin).parent if spec and spec.origin else Path(sysconfig.get_path("purelib")) / "torch"
    return found if (found / "include" / "torch").is_dir() else None


def cuda_of(folder: Path) -> str:
    """The CUDA version of that PyTorch; empty for a CPU build."""
    found = re.search(r"^cuda\b.*= '([\d.]+)'", (folder / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else ""


def missing() -> str:
    """What keeps the kernels from being built; empty when nothing does."""
    if nvcc() is None:
        return "nvcc was not found: install the CUDA toolkit, or set CUDA_HOME"
    folder = torch_folder()
    if folder is None:
        return "PyTorch's headers were not found: install torch first"
    if not cuda_of(folder) and os.environ.get("DSV4_KERNELS") != "require":
        return f"the PyTorch in {folder} is a build without CUDA"
    return ""


class Build(build_ext):
    """The C++ extension as usual. The kernels by nvcc, source by source, and one link against libtorch, whose CUDA part
    is only looked up when loaded.
    """

    def build_extension(self, ext: Extension) -> None:
        if ext is STEADY_PATH:
            super().build_extension(ext)
            return
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


_use_what_compiles()
reason = missing() if os.environ.get("DSV4_KERNELS") != "off" else "DSV4_KERNELS is off"
if reason and os.environ.get("DSV4_KERNELS") == "require":
    raise SystemExit(f"the CUDA kernels cannot be built: {reason}")
if reason:
    print(f"workspace is built without the CUDA kernels: {reason}", file=sys.stderr)
kernels = Extension("dsv4._kernels", [str(one.relative_to(ROOT)) for one in SOURCES], py_limited_api=True)
setup(ext_modules=[STEADY_PATH] if reason else [STEADY_PATH, kernels], cmdclass={"build_ext": Build})
