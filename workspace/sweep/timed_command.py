"""``workspace sweep --driver cuda``: steps of several sizes on a GPU, setting by setting; a later run goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from workspace.config import load_config
from workspace.errors import Unsupported
from workspace.sweep.plan import Replay
from workspace.sweep.report import make_folder
from workspace.sweep.session import find_workload
from workspace.sweep.timed import TRACE, Clock, CudaClock, Setting, measure
from workspace.sweep.timed_load import measure_load
from workspace.sweep.timed_report import Record, draw, print_timings, refused

ROUNDS = 40
SIZES = (2, 64, 512, 2048, 8192, TRACE)
"""Sizes of the steps that are timed where none is given."""


def run(
    console: Console,
    replay: Replay,
    safe: Mapping[str, bool],
    modes: Sequence[str],
    micro_batches: Sequence[int],
    aux_streams: Sequence[bool],
    tokens: Sequence[int],
    out: Path,
    allow_refused: bool,
    nvtx: bool = False,
    clock: Clock | None = None,
) -> int:
    """Time every strategy in every combination that `out` does not have yet; table and picture show all that it has.

    Parameters
    ----------
    nvtx
        An NVTX range around each lease, as under the setting of that name.

    Returns
    -------
    int
        The exit code: 1 when a cell was refused that may not be, else 0.
    """
    model = _open(replay, clock)
    clock = clock or CudaClock()
    console.print(model.description)
    rounds = replay.steps or ROUNDS
    make_folder(out)
    config = load_config(overrides={"nvtx": True} if nvtx else {}).config
    plan = {"workload": replay.workload, "model": model.description, "rounds": rounds, "strategies": list(safe)}
    plan |= {"nvtx": config.nvtx}
    record = Record(out, plan)
    for setting in (Setting(*one) for one in product(modes, micro_batches, aux_streams, tokens or SIZES)):
        if setting in record.done:
            console.print(f"{setting}: done before", style="dim")
        elif not model.differs(setting.mode, setting.tokens):
            console.print(f"{setting}: no graph takes such a step, it is one of mode eager", style="dim")
        else:
            began = time.perf_counter()
            if setting.tokens == TRACE:
                record.add(setting, measure_load(model, setting, safe, clock, config))
            else:
                record.add(setting, measure(model, setting, safe, rounds, clock, config))
            console.print(f"{setting}: timed in {time.perf_counter() - began:.1f} s", style="dim", highlight=False)
    print_timings(console, record.done, safe)
    if any(one.step_us for own in record.done.values() for one in own):
        draw(record.done, safe, record.title, out / "timed.png")
    console.print(f"written to {out}: timed.json, timed.png", highlight=False)
    problems = refused(record.done)
    for problem in problems:
        console.print(f"refused: {problem}", markup=False, highlight=False)
    return 1 if problems and not allow_refused else 0


def _open(replay: Replay, clock: Clock | None) -> Any:
    workload = find_workload(replay.workload)
    timed = getattr(workload, "timed", None)
    if timed is None or replay.driver not in workload.drivers:
        raise Unsupported(
            f"workload {replay.workload!r} does not run on the {replay.driver!r} driver",
            f"choose --driver {' or '.join(workload.drivers)}",
        )
    for what, given in (("--execute", replay.schedules), ("--trace", replay.trace)):
        if given:
            raise Unsupported(f"{what} with driver 'cuda', which times steps of given sizes", f"leave {what} out")
    if clock is None and not torch.cuda.is_available():
        raise Unsupported("there is no CUDA device", "choose --driver simulated, or run on a machine with a GPU")
    return timed(replay.model or workload.models[0], replay.seed, clock.device if clock else "cuda")
