"""The script crosses what it says, and the sweep finds it."""

from __future__ import annotations

import torch

import workspace
from dsv4.config import LayerKind
from dsv4.model.execution import ENGINE, GENERATED, REQUESTS, SCRIPT, Execution
from dsv4.model.presets import TINY
from dsv4.options import Options
from dsv4.workload import DSV4
from workspace.sweep.execute import execute
from workspace.sweep.plan import Cell, Replay
from workspace.sweep.result import Numbers

ROWS = [row for step in SCRIPT for row in step]


def test_the_script_crosses_what_there_is_to_cross() -> None:
    """Each of its properties, from its rows."""
    assert set(TINY.layer_kinds) == set(LayerKind)
    longest = max(start + count for _, start, count, _ in ROWS)
    assert longest == 128 and (0, 127, 1, False) in ROWS, "a group of 128 ends in a decode row"
    assert longest > TINY.sliding_window, "the window slides"
    assert longest // 4 > TINY.index_topk, "fewer compressed keys are chosen than there are"
    assert sum(request == 0 and prefill for request, _, _, prefill in ROWS) > 1, "a prompt comes in chunks"
    assert any({prefill for *_, prefill in step} == {True, False} for step in SCRIPT), "chunks stand beside decode rows"
    sizes = Options(mode="narrow").sizes(ENGINE)
    tokens = [sum(row[2] for row in step) for step in SCRIPT]
    assert max(tokens) <= sizes[-1] and any(count not in sizes for count in tokens), "steps are padded"
    assert GENERATED > 1, "a generated token is fed"


def test_rows_follow_one_another_and_decode_rows_come_first() -> None:
    """As a scheduler would make them."""
    reached = dict.fromkeys(REQUESTS, 0)
    for step in SCRIPT:
        kinds = [prefill for *_, prefill in step]
        assert kinds == sorted(kinds)
        for request, start, count, _ in step:
            assert start == reached[request]
            reached[request] += count


def test_the_sweep_executes_it() -> None:
    """The workload's configuration, in one cell, under one schedule."""
    replay = Replay("dsv4", "", None, "simulated", 1, 0, schedules=1)
    assert execute(replay, Cell("event_fenced", "narrow", 2, True), False) == Numbers(1, 1, 0)
    assert DSV4().execution(3).seed == 3


def test_a_run_leaves_no_block_and_no_lease() -> None:
    """Blocks of the caches and bytes of the workspace are back after each run."""
    ws = workspace.create("event_fenced", device="cpu", micro_batches=2)
    program = Execution(draft=True).prepare(ws, "eager", True, 2)
    runner = program._runner
    caches = [one.caches for one in (*runner.decoders, *runner.drafts)]
    free = [{name: one.free_blocks for name, one in each.allocators.items()} for each in caches]
    held = ws.snapshot().allocated
    with torch.no_grad():
        program.run()
    assert ws.locked and ws.snapshot().growths == 0
    assert [{name: one.free_blocks for name, one in each.allocators.items()} for each in caches] == free
    assert ws.snapshot().allocated == held
