"""What a call of each op costs the host, as the model calls it: ``python -m benchmarks.kernels.host_cost``.

At 2 rows, and at 64 for ops that have another kernel for many. Finely interleaved in one process, so that only ratios
count. The bare launch is an empty kernel through a boxed op of one tensor (csrc/bench/boxed.cpp). The returning form
allocates outs and scratch by PyTorch's allocator; slots of a lease of `upstream`, given as outs, are filled one by one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import workspace
from benchmarks import gpu
from benchmarks.first_run.__main__ import machine
from benchmarks.first_run.timing import interleaved
from benchmarks.kernels.calls import CALLS, call
from benchmarks.kernels.maker import Call
from workspace import Layout, spec

ROWS = 2
MANY = {"mhc_pre": 64, "mhc_post_pre": 64}
"""Rows of ops whose kernel for many costs the host more: it has the driver describe tensors at each call."""

BARE = "bare launch"
NEW = "x.new_empty"
FACES = "out form", "dispatched", "returning form", "slots"
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


@contextmanager
def slots(calls: dict[str, Call]) -> Iterator[dict[str, dict[str, Any]]]:
    """For each op, slots for its outs and scratch, of leases that are held meanwhile."""
    ws = workspace.create("upstream", device="cuda", allow_unsafe=True)
    with ExitStack() as held:
        found = {}
        for name, one in calls.items():
            tensors = (*one.outs, *one.scratch)
            specs: dict[str, Any] = {f"one{n}": spec(*each.shape, dtype=each.dtype) for n, each in enumerate(tensors)}
            if specs:
                lease = held.enter_context(ws.lease(Layout(name, **specs)))
                every = tuple(getattr(lease, key) for key in specs)
                count = len(one.outs)
                found[name] = {"slots": every, "slot_out": every[:count], "slot_scratch": every[count:]}
        yield found


def statements(calls: dict[str, Call], slots_of: dict[str, dict[str, Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """Statements to time and their scope: each op's out form, its dispatched face, and its returning forms."""
    found = {"empty statement": "pass", BARE: "bare(x)", NEW: "x.new_empty((2, 64, 512))"}
    scope: dict[str, Any] = {"bare": torch.ops.calling_boxed.one, "x": torch.zeros(2, 8, device="cuda")}
    for number, (name, one) in enumerate(calls.items()):
        mine = {"op": one.op, "overload": one.op.overload, "every": (*one.inputs, *one.outs, *one.scratch)}
        mine |= {"inputs": one.inputs, "out": one.outs or None, "scratch": one.scratch or None}
        mine |= slots_of.get(name, {}) | {"returning": one.op.returning, "untold": one.untold}
        scope |= {f"{key}{number}": value for key, value in mine.items()}
        found[f"{name}, out form"] = f"op{number}(*inputs{number}, out=out{number}, scratch=scratch{number})"
        found[f"{name}, dispatched"] = f"overload{number}(*every{number})"
        if name in slots_of:
            found[f"{name}, returning form"] = f"returning{number}(*inputs{number}, **untold{number})"
            filled = f"op{number}(*inputs{number}, out=slot_out{number}, scratch=slot_scratch{number})"
            found[f"{name}, slots"] = f"for slot in slots{number}: slot._tensor = None\n{filled}"
    return found, scope


def measured() -> dict[str, Any]:
    """us of each statement, ratios to the bare launch, and the sum over a C4 layer."""
    calls = {name: call(name, ROWS) for name in CALLS} | {
        f"{name}_{rows}": call(name, rows) for name, rows in MANY.items()
    }
    with torch.inference_mode(), slots(calls) as slots_of:
        found, scope = statements(calls, slots_of)
        taken = interleaved(found, scope, settle=torch.cuda.synchronize, rounds=21, calls=60)
    middle = {name: one["median_us"] for name, one in taken.items()}
    for name in calls:  # what has no outs of its own returns nothing
        for face in ("returning form", "slots"):
            middle.setdefault(f"{name}, {face}", middle[f"{name}, out form"])
    limit = LIMIT * middle[BARE]
    made = {name: len(one.outs) + len(one.scratch) for name, one in calls.items()}
    by_op = {face: {name: count * middle[f"{name}, {face}"] for name, count in LAYER.items()} for face in FACES}
    return {
        "rows": ROWS,
        "us": taken,
        "over_bare_launch": {name: round(middle[f"{name}, out form"] / middle[BARE], 2) for name in calls},
        "tensors_returned": made,
        "returning_over_target": {
            name: round(middle[f"{name}, returning form"] / (limit + bool(made[name]) * middle[NEW]), 2)
            for name in calls
        },
        "c4_layer_us": {face: round(sum(own.values()), 1) for face, own in by_op.items()},
        "c4_layer_us_by_op": {face: {name: round(us, 2) for name, us in own.items()} for face, own in by_op.items()},
        "c4_layer_calls": LAYER,
    }


def show(results: dict[str, Any]) -> None:
    """A line an op, then the layer op by op."""
    taken = {name: one["median_us"] for name, one in results["us"].items()}
    print(f"bare launch {taken[BARE]:.2f} us, x.new_empty {taken[NEW]:.2f} us")
    for name, ratio in results["over_bare_launch"].items():
        own = {face: taken.get(f"{name}, {face}", 0.0) for face in FACES}
        columns = ", ".join(f"{face} {us:6.2f}" for face, us in own.items())
        targets = f"{ratio / LIMIT:.2f} and {results['returning_over_target'][name]:.2f} of the targets"
        print(f"{name:24} {columns}; {results['tensors_returned'][name]} tensors; {targets}")
    print(f"a C4 layer: {results['c4_layer_us']}")
    for name, count in LAYER.items():
        both = (results["c4_layer_us_by_op"][face][name] for face in ("out form", "returning form"))
        print(f"  {count} x {name:24}", *(f"{us:6.2f}" for us in both))


def main() -> None:
    """Measure, print a line an op, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--library", type=Path, help="csrc/bench/boxed.cpp and empty_kernel.cu, built before")
    options = parser.parse_args()
    gpu.require()
    bare_library(options.library)
    results = {"machine": machine(), "commit": options.commit, **measured()}
    show(results)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
