"""Tables of a first run, from its JSON file: ``python -m benchmarks.first_run.report first-run.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MODES = ("no_grad, launch", "inference_mode, launch", "inference_mode, no launch")
REFERENCE = "boxed, out form"


def ratios(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Host time of each calling convention over that of the boxed out form in the same interleaved batch."""
    found: dict[str, dict[str, float]] = {}
    for mode in MODES[:2]:
        taken = results["calling"][mode]
        reference = taken[REFERENCE]["median_us"]
        for name, figures in taken.items():
            found.setdefault(name, {})[mode] = round(figures["median_us"] / reference, 2)
    return found


def calling_table(results: dict[str, Any]) -> list[str]:
    """One row for each convention: us in each mode, and the ratio with the launch."""
    lines = [
        "| call | " + " | ".join(f"{mode}, us" for mode in MODES) + " | over boxed out form |",
        "|---|" + "---|" * 4,
    ]
    over = ratios(results)
    for name in results["calling"][MODES[0]]:
        taken = [results["calling"][mode].get(name) for mode in MODES]
        cells = [_median(figures) if figures else "-" for figures in taken]
        lines.append(f"| {name} | {' | '.join(cells)} | {over[name][MODES[0]]}, {over[name][MODES[1]]} |")
    return lines


def acquire_table(results: dict[str, Any]) -> list[str]:
    """One row for each part of an acquire."""
    rows = {
        **results["acquire"]["us"],
        **results["noticing"]["costs"]["steady"],
        **results["noticing"]["costs"]["capture"],
    }
    return ["| part | us |", "|---|---|"] + [f"| {name} | {_median(figures)} |" for name, figures in rows.items()]


def contract_table(results: dict[str, Any]) -> list[str]:
    """One row for each scenario: verdict with the fence, and of the control, on each allocator."""
    sections = {
        name.removeprefix("contract, "): found for name, found in results.items() if name.startswith("contract")
    }
    lines = ["| scenario | " + " | ".join(sections) + " |", "|---|" + "---|" * len(sections)]
    for scenario, verdicts in next(iter(sections.values())).items():
        if isinstance(verdicts, dict) and "fenced" in verdicts:
            cells = [_verdict(found[scenario]) for found in sections.values()]
            lines.append(f"| {scenario} | {' | '.join(cells)} |")
    return lines


def _verdict(found: dict[str, list[str]]) -> str:
    return f"{'/'.join(sorted(set(found['fenced'])))}; control {'/'.join(sorted(set(found['control'])))}"


def _median(figures: dict[str, float]) -> str:
    return f"{figures['median_us']:.2f}"


if __name__ == "__main__":
    loaded = json.loads(Path(sys.argv[1]).read_text())
    for table in (contract_table, acquire_table, calling_table):
        print("\n".join(table(loaded)), end="\n\n")
