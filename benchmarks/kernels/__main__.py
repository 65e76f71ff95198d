"""``python -m benchmarks.kernels --output FILE [--commit HASH] [NAME ...]``: device time of every kernel in a graph."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.first_run.__main__ import machine
from benchmarks.kernels.cases import CASES, Case
from benchmarks.kernels.graph_time import SETS, copy_us, graph_us, nothing_us


def main() -> None:
    """Measure, print a line a size, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    gpu.require()
    results: dict[str, Any] = {"machine": machine(), "commit": options.commit, "nothing_us": nothing_us()}
    print(f"a node that does nothing: {results['nothing_us']:.2f} us")
    wanted = [name for name in CASES if not options.names or any(name.startswith(one) for one in options.names)]
    for name in wanted:
        rows = [one for one in CASES[name].rows if not options.rows or one in options.rows]
        results[name] = [_measured(name, CASES[name], count) for count in rows]
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")


def _measured(name: str, case: Case, rows: int) -> dict[str, Any]:
    calls = [case.make(rows, seed) for seed in range(SETS)]
    nbytes, flop = case.floor_bytes(calls[0]), case.floor_flop(calls[0])
    own = graph_us([one.run for one in calls])
    del calls
    copy = copy_us(nbytes)
    torch.cuda.empty_cache()
    found: dict[str, float] = {
        "rows": rows,
        "bytes": nbytes,
        "us": round(own, 2),
        "copy_us": round(copy, 2),
        "tb_s": round(nbytes / own / 1e6, 3),
        "of_copy": round(copy / own, 3),
    }
    if flop:
        # The ceilings measured on this machine: 4.3 TB/s of a large copy, 790 Tflop/s of a large bf16 product.
        floor = max(nbytes / 4.3e6, flop / 790e6)
        found |= {"tflop_s": round(flop / own / 1e6, 1), "floor_us": round(floor, 2), "of_floor": round(floor / own, 3)}
    beside = f"  {found['tflop_s']:.0f} Tflop/s, {found['of_floor']:.2f} of the floor" if flop else ""
    speed = f"{found['us']:8.2f} us, copy {found['copy_us']:8.2f}, {found['tb_s']:.2f} TB/s, {found['of_copy']:.2f}"
    print(f"{name:26} {rows:5} {speed}{beside}", flush=True)
    return found


if __name__ == "__main__":
    main()
