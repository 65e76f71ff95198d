"""Runs every section in a process of its own and writes one JSON file.

python -m benchmarks.first_run --output first-run.json --commit COMMIT [--section NAME ...]
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import gpu
from benchmarks.first_run import report

BACKENDS = {
    "native": "",
    "expandable_segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}
SECTIONS = {
    **{f"contract, {name}": ("contract", setting) for name, setting in BACKENDS.items()},
    "noticing": ("noticing", ""),
    "acquire": ("acquire", ""),
    "calling": ("calling", ""),
}
_MARK = "first-run result: "


def main() -> int:
    """Parse, run the sections, write what they found. Returns 1 when a section failed; exits with 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--section", action="append", choices=list(SECTIONS))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        module = importlib.import_module(f"benchmarks.first_run.{options.measure}")
        print(_MARK + json.dumps(module.measure()))
        return 0
    gpu.require()
    results: dict[str, Any] = {"machine": machine(), "commit": options.commit}
    failed = False
    for name in options.section or SECTIONS:
        results[name] = run_section(*SECTIONS[name])
        failed |= "failed" in results[name]
        print(f"{name}: {'FAILED' if 'failed' in results[name] else 'done'}", flush=True)
        if name == "calling" and "failed" not in results[name]:
            results["calling, ratio to boxed out form"] = report.ratios(results)
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(failed)


def run_section(module: str, allocator: str) -> dict[str, Any]:
    """Results of one section, or the end of its error output."""
    environment = dict(os.environ)
    if allocator:
        environment["PYTORCH_ALLOC_CONF"] = allocator
    command = [sys.executable, "-m", "benchmarks.first_run", "--measure", module]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as expired:
        return {"failed": f"no result within {expired.timeout} s"}
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    return {"failed": f"exit {done.returncode}", "stderr": done.stderr[-3000:]}


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    import torch

    name, driver = gpu.said("name", "driver_version")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": name,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
