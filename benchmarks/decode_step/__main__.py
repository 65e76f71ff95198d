"""``python -m benchmarks.decode_step --out FOLDER [--rounds N] [--steps N] [--layers N] [SECTION ...]``.

Sections: micro, profile, pair, peak, buckets, deep, control, and step.MODE and stress.MODE for each run mode. Each is
written when it is done; one that fails is written with its error, and the others run all the same. Those of stress, and
deep, control and buckets, take no times and may run side by side.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.decode_step import buckets, micro, peak, step, stress
from benchmarks.decode_step.model import Bench, flash
from benchmarks.decode_step.report import table
from dsv4.ops import kernels
from workspace import native
from workspace.sweep.report import provenance
from workspace.sweep.workload import MODES

SECTIONS = (
    "micro",
    "profile",
    *(f"step.{mode}" for mode in step.NAMES),
    "pair",
    "peak",
    "buckets",
    "deep",
    "control",
    *(f"stress.{mode}" for mode in MODES),
)


def main() -> int:
    """Run the sections; 1 when one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=SECTIONS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=400, help="Rounds of the section pair.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=flash().num_hidden_layers)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    gpu.require()
    options.out.mkdir(parents=True, exist_ok=True)
    made = machine(options.commit)
    failed = 0
    bench: list[Bench] = []
    for name in options.sections:
        began = time.perf_counter()
        try:
            found: Any = {"found": _section(name, options, bench)}
        except Exception as error:
            traceback.print_exc()
            found, failed = {"failed": f"{type(error).__name__}: {error}"[:2000]}, 1
        found |= {"section": name, "made": made, "seconds": round(time.perf_counter() - began, 1)}
        (options.out / f"{name}.json").write_text(json.dumps(found) + "\n")
        print("\n".join(table(found)), flush=True)
    return failed


def _section(name: str, options: Any, bench: list[Bench]) -> Any:
    simple: dict[str, Callable[[], Any]] = {
        "micro": micro.measure,
        "peak": peak.measure,
        "buckets": buckets.measure,
        "control": stress.control,
    }
    with torch.no_grad():
        if name in simple:
            return simple[name]()
        kind, _, mode = name.partition(".")
        if kind == "stress":
            return stress.measure(mode, options.steps)
        if not bench:
            bench.append(Bench(flash(options.layers)))
            _, runner = bench[0].runner("caching")
            bench[0].fill(runner)
            torch.cuda.synchronize()
        if name == "profile":
            return step.profile(bench[0])
        if name == "deep":
            return stress.deep(bench[0])
        found = step.pair(bench[0], options.pairs) if name == "pair" else step.measure(bench[0], mode, options.rounds)
    config = bench[0].config
    model = {
        "layers": config.num_hidden_layers, "experts": config.n_routed_experts,
        "expert_inner": config.moe_intermediate_size, "cache_bytes": bench[0].caches.nbytes,
    }  # fmt: skip
    return {"model": model, "rounds": options.pairs if name == "pair" else options.rounds} | found


def machine(commit: str) -> dict[str, Any]:
    """What the figures were taken on, and in which form the hot paths and the kernels ran."""
    (driver,) = gpu.said("driver_version")
    made = provenance() | {"driver": driver, "lease_and_fork": native.form(), "kernels_missing": kernels.MISSING}
    return made | ({"commit": commit} if commit else {})


if __name__ == "__main__":
    raise SystemExit(main())
