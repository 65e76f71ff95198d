"""Tables of a run, from its JSON files: ``python -m benchmarks.kernels.report kernels.json [host_cost.json]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def kernel_table(results: dict[str, Any]) -> list[str]:
    """One row for each op and number of rows: time in the graph, bandwidth, and both beside a copy."""
    lines = ["| op | rows | us | copy, us | TB/s | of copy | of floor |", "|---|---|---|---|---|---|---|"]
    for name, sizes in results.items():
        for one in sizes if isinstance(sizes, list) else ():
            floor = f"{one['of_floor']:.2f}" if "of_floor" in one else ""
            figures = f"{one['us']:.2f} | {one['copy_us']:.2f} | {one['tb_s']:.2f} | {one['of_copy']:.2f} | {floor}"
            lines.append(f"| {name} | {one['rows']} | {figures} |")
    return lines


def host_table(results: dict[str, Any]) -> list[str]:
    """One row for each op: the out form as the model calls it, over the bare launch, and the other faces."""
    lines = [
        "| op | out form, us | over the bare launch | dispatched, us | returning, us | its tensors | of its target |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ratio in results["over_bare_launch"].items():
        own, dispatched, returning = (
            results["us"].get(f"{name}, {face}", {}).get("median_us")
            for face in ("out form", "dispatched", "returning form")
        )
        returned = f"{returning:.2f}" if returning else ""
        figures = f"{own:.2f} | {ratio:.2f} | {dispatched:.2f} | {returned} | {results['tensors_returned'][name]}"
        lines.append(f"| {name} | {figures} | {results['returning_over_target'][name]:.2f} |")
    return lines


if __name__ == "__main__":
    tables = (kernel_table, host_table)
    for path, table in zip(sys.argv[1:], tables, strict=False):
        print("\n".join(table(json.loads(Path(path).read_text()))), end="\n\n")
