"""What a call of each op costs the host at 2 rows, as the model calls it: ``python -m benchmarks.kernels.host_cost``.

Finely interleaved in one process, so that only ratios count. The bare launch is an empty kernel through a boxed op of
one tensor (csrc/bench/boxed.cpp).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_run.__main__ import machine
from benchmarks.first_run.timing import interleaved
from benchmarks.kernels.calls import CALLS, call
from benchmarks.kernels.maker import Call

ROWS = 2
BARE = "bare launch"
LIMIT = 1.5
SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "bench"

LAYER = {
    "mhc_post_pre": 2, "q_kv_rmsnorm": 1, "q_norm_rope_kv_insert": 1, "indexer_q_rope_fp8": 1, "save_partial_states": 2,
    "compress": 2, "indexer_logits": 1, "indexer_top_k": 1, "global_top_k": 1, "sparse_attention_decode": 1,
    "inverse_rope": 1,
}  # fmt: skip
"""Calls of a C4 layer's decode step."""


def bare_library(built: Path | None) -> None:
    """Registers the bare op, from a library that is there or from its sources."""
    if built:
        torch.ops.load_library(str(built))
        return
    from torch.utils import cpp_extension

    sources = [str(SOURCES / name) for name in ("boxed.cpp", "empty_kernel.cu")]
    cpp_extension.load(name="bare", sources=sources, is_python_module=False)


def statements(calls: dict[str, Call]) -> tuple[dict[str, str], dict[str, Any]]:
    """Statements to time and their scope: each op's out form, and its dispatched face."""
    found = {"empty statement": "pass", BARE: "bare(x)", "x.new_empty": "x.new_empty((2, 64, 512))"}
    scope: dict[str, Any] = {"bare": torch.ops.calling_boxed.one, "x": torch.zeros(2, 8, device="cuda")}
    for number, (name, one) in enumerate(calls.items()):
        mine = {"op": one.op, "overload": one.op.overload, "every": (*one.inputs, *one.outs, *one.scratch)}
        mine |= {"inputs": one.inputs, "out": one.outs or None, "scratch": one.scratch or None}
        scope |= {f"{key}{number}": value for key, value in mine.items()}
        found[f"{name}, out form"] = f"op{number}(*inputs{number}, out=out{number}, scratch=scratch{number})"
        found[f"{name}, dispatched"] = f"overload{number}(*every{number})"
    return found, scope


def measured() -> dict[str, Any]:
    """us of each statement, ratios to the bare launch, and the sum over a C4 layer."""
    calls = {name: call(name, ROWS) for name in CALLS}
    found, scope = statements(calls)
    with torch.inference_mode():
        taken = interleaved(found, scope, settle=torch.cuda.synchronize, rounds=11, calls=100)
    bare = taken[BARE]["median_us"]
    ratios = {name: round(taken[f"{name}, out form"]["median_us"] / bare, 2) for name in calls}
    layer = {
        face: round(sum(count * taken[f"{name}, {face}"]["median_us"] for name, count in LAYER.items()), 1)
        for face in ("out form", "dispatched")
    }
    return {"rows": ROWS, "us": taken, "over_bare_launch": ratios, "c4_layer_us": layer, "c4_layer_calls": LAYER}


def main() -> None:
    """Measure, print a line an op, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--library", type=Path, help="csrc/bench/boxed.cpp and empty_kernel.cu, built before")
    options = parser.parse_args()
    bare_library(options.library)
    results = {"machine": machine(), "commit": options.commit, **measured()}
    taken = results["us"]
    print(f"bare launch {taken[BARE]['median_us']:.2f} us, x.new_empty {taken['x.new_empty']['median_us']:.2f} us")
    for name, ratio in results["over_bare_launch"].items():
        faces = [taken[f"{name}, {face}"]["median_us"] for face in ("out form", "dispatched")]
        print(f"{name:26} {faces[0]:6.2f} us, {ratio:.2f} of the bare launch; dispatched {faces[1]:6.2f} us")
    print(f"a C4 layer: {results['c4_layer_us']}")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
