"""Benchmarks that need a GPU: refused in two lines where there is none, before anything is written."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from benchmarks import gpu

COMMANDS = {
    "decode_step.__main__": "--out",
    "kernels.__main__": "--output",
    "kernels.host_cost": "--output",
    "first_run.__main__": "--output",
}
"""Modules, and the option that says where results go."""


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_gpu_a_command_ends_in_two_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is missing, and what to do; the exit status is that of other refusals."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["command", COMMANDS[name], str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    problem, remedy = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert problem.startswith("Error: PyTorch") and problem.endswith("sees no CUDA device")
    assert remedy.startswith("Remedy: ") and "`python -m benchmarks`" in remedy


def test_a_driver_that_cannot_be_asked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the run would end in a FileNotFoundError; where it can be, its answer is taken apart."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        gpu.require()
    assert ended.value.code == 2 and "'nvidia-smi' is not on the PATH" in capsys.readouterr().err
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --query-gpu=name,driver_version ] && echo "NVIDIA H200, 580.1"\n')
    program.chmod(0o755)
    gpu.require()
    assert gpu.said("name", "driver_version") == ["NVIDIA H200", "580.1"]
