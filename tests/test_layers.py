"""Who may import whom: the contracts of pyproject.toml hold, and each would be seen to break."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("workspace", "dsv4", "benchmarks")
CHECK = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"


def check_imports(root: Path) -> tuple[int, list[str]]:
    """Exit code of the check, and the names of the broken contracts."""
    command = [sys.executable, "-c", CHECK]
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, cwd=root, env=wide, capture_output=True, text=True, check=False)
    return done.returncode, [line for line in done.stdout.splitlines() if "BROKEN" in line]


def test_contracts_hold() -> None:
    """The tree obeys every contract."""
    assert check_imports(ROOT) == (0, [])


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("workspace/layout.py", "import dsv4", "The framework knows neither"),
        ("workspace/sweep/plan.py", "import benchmarks", "The framework knows neither"),
        ("dsv4/__init__.py", "import workspace.clocks", "The model uses"),
        ("workspace/strategies/event_fenced.py", "import workspace.cuda", "Strategies do not know"),
        ("workspace/simulated/node.py", "import workspace.clocks", "The simulated device judges"),
        ("workspace/clocks.py", "import workspace.timeline", "The clocks stand"),
    ],
)
def test_forbidden_import_breaks_its_contract(tmp_path: Path, module: str, line: str, contract: str) -> None:
    """With one forbidden import added to a copy of the tree, the contract about it is broken."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as source:
        source.write(f"\n{line}\n")
    code, broken = check_imports(tmp_path)
    assert code == 1 and any(name.startswith(contract) for name in broken)
