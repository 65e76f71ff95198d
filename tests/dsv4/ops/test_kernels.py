"""The CUDA kernels seen from a machine without a GPU: their table, their build, and what happens without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4 import ops
from dsv4.ops import kernels
from tests.dsv4.ops.samples import OPS

ROOT = Path(__file__).resolve().parents[3]
LETTERS = {"Tensor": "t", "Optional[Tensor]": "o", "int": "i", "bool": "b", "float": "f"}
ROW = re.compile(r'\{"(\w+)", "(\w+)", \w+\}')


def test_signatures_in_the_table_are_those_of_the_schemas() -> None:
    """One letter an argument; both faces read arguments by them."""
    table = dict(ROW.findall((ROOT / "csrc/dsv4/table.cpp").read_text(encoding="utf-8")))
    assert {"q_norm_rope_kv_insert", "compress", "indexer_logits", "sparse_attention_decode", "mhc_post_pre"} <= set(
        table
    )
    for name in set(table) & set(OPS):
        arguments = OPS[name].overload._schema.arguments
        assert table[name] == "".join(LETTERS[str(one.type)] for one in arguments), name


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_without_cuda_the_package_says_so_and_runs_references() -> None:
    """No kernel, no fast face, and a reason."""
    assert "build without CUDA" in kernels.MISSING
    assert not kernels.NAMES and not kernels.FAST
    found = ops.rms_norm(torch.ones(2, 8), torch.full((8,), 3.0), 0.0)
    assert found.eq(3).all()


def build(**environment: str) -> subprocess.CompletedProcess[str]:
    """The build's own look at the machine, which ends before it compiles."""
    changed = {**os.environ, **environment}
    return subprocess.run([sys.executable, "setup.py", "--name"], cwd=ROOT, env=changed, capture_output=True, text=True)


def test_the_build_names_what_is_missing(tmp_path: Path) -> None:
    """Left out with a line that says why; refused where the kernels are required."""
    nowhere = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    left_out = build(**nowhere)
    assert left_out.returncode == 0
    assert "built without the CUDA kernels: nvcc was not found" in left_out.stderr
    refused = build(**nowhere, DSV4_KERNELS="require")
    assert refused.returncode != 0
    assert "cannot be built: nvcc was not found" in refused.stderr
