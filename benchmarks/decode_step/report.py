"""Short tables of what a section found: ``python -m benchmarks.decode_step.report FOLDER``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

MIB = 1 << 20


def table(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    name, made = result["section"], result["made"]
    lines = [
        f"## {name}",
        "",
        f"{made['date']}, commit {made['commit']}, {made['gpu']}, driver {made['driver']}, PyTorch {made['torch']}, "
        f"Python {made['python']}; lease and fork in {made['lease_and_fork']}; {result['seconds']} s.",
        "",
    ]
    if "failed" in result:
        return [*lines, f"failed: {result['failed']}", ""]
    kind = name.partition(".")[0]
    return [*lines, *TABLES[kind](result["found"]), ""]


def _steps(found: dict[str, Any]) -> list[str]:
    lines = [
        "| strategy | step us | host us | device us | allocator calls | fences | held MiB | peak MiB | same bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, own in found["samples"].items():
        counts = found["counts"].get(name)
        cells = [f"{median(own[figure]):,.0f}" for figure in ("step_us", "host_us", "device_us")]
        if counts:
            cells += [f"{counts['allocator_calls']:,}", f"{counts['fences']:,}"]
            cells += [f"{counts[key] / MIB:,.1f}" for key in ("held_bytes", "peak_bytes")]
            same = found["same_bits"] if "same_bits" in found else found["bits_of_caching"]  # its older name
            cells.append("yes" if same[name] else "NO")
        else:
            cells += [""] * 5
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| ratio | step | host |", "|---|---|---|"]
    for pair, own in found["ratios"].items():
        shown = [
            f"{own[figure][0]:.3f} ({own[figure][1]:.3f} to {own[figure][2]:.3f})" for figure in ("step_us", "host_us")
        ]
        lines.append(f"| {pair} | " + " | ".join(shown) + " |")
    return lines


def _micro(found: dict[str, Any]) -> list[str]:
    fence, fork, replay = (found[name] for name in ("fence", "fork", "replay"))
    rows: list[tuple[str, float, dict[str, float]]] = []
    for name, own in found["stage"].items():
        rows.append(
            (f"{name}: {own['tensors']} tensors of a stage, read, over torch.empty", own["over_empty"], own["us"])
        )
    rows += [
        (f"a fenced acquire over its parts ({fence['fences']:,} fences)", fence["over_its_parts"], fence["us"]),
        ("the same, the switch of streams that each holds counted once", fence["switched_once"], fence["us"]),
        ("fork and join of three branches over the usual idiom", fork["over_idiom"], fork["us"]),
        (f"replay of a graph of {replay['segments']} segments over its raw replays", replay["over_raw"], replay["us"]),
    ]
    lines = ["| what | ratio | us |", "|---|---|---|"]
    for what, ratio, us in rows:
        lines.append(f"| {what} | {ratio:.3f} | {', '.join(f'{key} {value:.2f}' for key, value in us.items())} |")
    return lines


def _profile(found: dict[str, str]) -> list[str]:
    lines = []
    for name, text in found.items():
        lines += [name, "", *(f"    {line}" for line in text.splitlines() if line), ""]
    return lines


def _peak(found: dict[str, Any]) -> list[str]:
    lines = ["| strategy | peak MiB | reserved MiB |", "|---|---|---|"]
    return lines + [
        f"| {name} | {own['peak_bytes'] / MIB:,.0f} | {own['reserved_bytes'] / MIB:,.0f} |"
        for name, own in found.items()
    ]


def _buckets(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| strategy | mode | buckets | footprint MiB: largest alone | all | ratio | device MiB: alone | all | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        cells = [one["strategy"], one["mode"], str(len(one["sizes"]))]
        for figure in ("footprint", "device"):
            alone, every = one["alone"][figure], one["all"][figure]
            cells += [f"{alone / MIB:,.1f}", f"{every / MIB:,.1f}", f"{every / alone:.3f}" if alone else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _stress(found: list[dict[str, Any]]) -> list[str]:
    lines = ["| strategy | mode | micro-batches | steps | mismatches |", "|---|---|---|---|---|"]
    return lines + [
        f"| {one['strategy']} | {one['mode']} | {one['micro_batches']} | {one.get('steps', '')} | "
        f"{one.get('mismatches', one.get('failed'))}{', then ' + one['ended'] if one.get('ended') else ''} |"
        for one in found
    ]


TABLES: dict[str, Callable[[Any], list[str]]] = {
    "step": _steps,
    "micro": _micro,
    "pair": _steps,
    "peak": _peak,
    "buckets": _buckets,
    "control": _stress,
    "stress": _stress,
    "deep": _stress,
    "profile": _profile,
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for path in sorted(folder.glob("*.json")):
        print("\n".join(table(json.loads(path.read_text()))))
