"""Run the cells of a sweep in worker processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from itertools import groupby

import attrs
import torch

from workspace.sweep.cell import measure
from workspace.sweep.host_time import host_costs
from workspace.sweep.plan import Cell, Replay
from workspace.sweep.result import HostCost, Refused, Result


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
    cells
        Those of a setting are neighbours: they are timed together.
    safe
        Whether each strategy claims to be safe; an unsafe one is created with the consent it asks for.
    sampled
        Whether a cell collects its bytes over time.
    jobs
        Worker processes; one runs the cells in this process.
    """
    settings = [list(group) for _, group in groupby(cells, key=lambda cell: cell.setting)]
    if jobs == 1:
        for together in settings:
            costs = host_costs(replay, together, safe)
            for cell in together:
                yield _with_cost(measure(replay, cell, not safe[cell.strategy], sampled(cell)), costs)
        return
    # spawn: a forked copy of torch's thread pools can deadlock
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,))
    try:
        timed: dict[tuple[str, int, bool], Future[dict[Cell, HostCost | Refused]]] = {}
        futures: list[Future[Result | Refused]] = []
        for together in settings:
            timed[together[0].setting] = pool.submit(host_costs, replay, together, safe)
            for cell in together:
                futures.append(pool.submit(measure, replay, cell, not safe[cell.strategy], sampled(cell)))
        for future in as_completed(futures):
            result = future.result()
            yield _with_cost(result, timed[result.cell.setting].result())
    finally:
        pool.shutdown(cancel_futures=True)


def _with_cost(result: Result | Refused, costs: Mapping[Cell, HostCost | Refused]) -> Result | Refused:
    cost = costs[result.cell]
    if isinstance(result, Refused):
        return result
    if isinstance(cost, Refused):
        return cost
    return attrs.evolve(result, host_us=cost.us, host_replays_us=cost.replays_us, host_again_us=cost.again_us)
