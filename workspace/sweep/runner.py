"""Run the cells of a sweep in worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

import torch

from workspace.sweep.cell import measure
from workspace.sweep.plan import Cell, Replay
from workspace.sweep.result import Refused, Result


def run_cells(
    replay: Replay,
    cells: Sequence[Cell],
    safe: Mapping[str, bool],
    sampled: Callable[[Cell], bool],
    jobs: int,
) -> Iterator[Result | Refused]:
    """The result of each cell, as they finish.

    Parameters
    ----------
    safe
        Whether each strategy claims to be safe; an unsafe one is created with the consent it asks for.
    sampled
        Whether a cell collects its bytes over time.
    jobs
        Worker processes; one runs the cells in this process.
    """
    if jobs == 1:
        for cell in cells:
            yield measure(replay, cell, not safe[cell.strategy], sampled(cell))
        return
    # spawn: a forked copy of torch's thread pools can deadlock
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,))
    try:
        futures: list[Future[Result | Refused]] = [
            pool.submit(measure, replay, cell, not safe[cell.strategy], sampled(cell)) for cell in cells
        ]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
