"""Host time of the steps of a setting's cells, which take each step in turn.

The host cost of a step is the thread's CPU time of ``Runner.run(step)``: the model's Python, the framework
(acquire, release, forks, fences, graphs), the simulated device's stand-ins for launch, record and wait, and a
``torch.empty`` on the CPU for each allocation. It leaves out the operations themselves, the access log and
garbage collection. It is not the time of the same step with CUDA: compare strategies by the ratio in one run.

On a machine that does other work, too, CPU time goes up, and never down: cores share caches and execution units. So
each step's least time of several replays counts, and a busy moment, which may last for all of them, meets every
strategy alike. How good the ratio is says `REFERENCE`, which takes each step twice, on two workspaces.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from workspace.errors import WorkspaceError
from workspace.sweep.devices import TimedDevice
from workspace.sweep.plan import REFERENCE, Cell, Replay
from workspace.sweep.protocol import ProtocolError
from workspace.sweep.result import HostCost, Refused
from workspace.sweep.session import prepare, session_of, steps_of
from workspace.sweep.setup import workspace_of
from workspace.sweep.timed import collected
from workspace.sweep.workload import Session, Step

REPLAYS = 3


class HostTime:
    """Times steps of a cell on one workspace of a device of its own.

    Parameters
    ----------
    allow_unsafe
        Consent to a strategy that does not keep scratch intact; the memory is virtual.
    """

    def __init__(self, session: Session, replay: Replay, cell: Cell, allow_unsafe: bool) -> None:
        device = TimedDevice(memory="virtual", seed=replay.seed, log=False)
        self._ws = workspace_of(cell, device, allow_unsafe, statistics=False)
        self._runner = prepare(session, self._ws, replay, cell)
        self._taken: list[list[float]] = []

    def begin(self) -> None:
        """The steps that follow are another replay."""
        self._taken.append([])

    def run(self, step: Step) -> None:
        """Time a step."""
        began = time.thread_time_ns()
        self._runner.run(step)
        self._taken[-1].append((time.thread_time_ns() - began) / 1000)

    def close(self) -> None:
        """Give everything back."""
        self._runner.close()
        self._ws.close()

    @property
    def us(self) -> float:
        """Mean over the steps of each one's least time, us."""
        least = [min(times) for times in zip(*self._taken, strict=True)]
        return sum(least) / len(least)

    @property
    def replays_us(self) -> tuple[float, ...]:
        """Of each replay, the mean over the steps, us."""
        return tuple(sum(taken) / len(taken) for taken in self._taken)


def host_costs(replay: Replay, cells: Sequence[Cell], safe: Mapping[str, bool]) -> dict[Cell, HostCost | Refused]:
    """What each cell of one setting costs the host, or the typed error by which it was refused."""
    found: dict[Cell, HostCost | Refused] = {}
    first: dict[Cell, HostTime] = {}
    again: dict[Cell, HostTime] = {}
    with torch.no_grad():
        session = session_of(replay)
        steps = steps_of(session, replay)
        for cell in cells:
            for opened in (first, again) if cell.strategy == REFERENCE else (first,):
                with _refusals(cell, found):
                    opened[cell] = HostTime(session, replay, cell, not safe[cell.strategy])
        shuffler = random.Random(replay.seed)
        for _ in range(REPLAYS):
            with collected():
                _replay([*first.items(), *again.items()], found, steps, shuffler)
        for host in (*first.values(), *again.values()):
            host.close()
    for cell, host in first.items():
        if cell not in found:
            found[cell] = HostCost(host.us, host.replays_us, again[cell].us if cell in again else None)
    return found


def _replay(
    hosts: list[tuple[Cell, HostTime]],
    found: dict[Cell, HostCost | Refused],
    steps: Sequence[Step],
    shuffler: random.Random,
) -> None:
    """Time every step on each, one after the other in an order that is shuffled, until it is refused."""
    for _, host in hosts:
        host.begin()
    for step in steps:
        shuffler.shuffle(hosts)
        for cell, host in hosts:
            if cell not in found:
                with _refusals(cell, found):
                    host.run(step)


@contextmanager
def _refusals(cell: Cell, found: dict[Cell, HostCost | Refused]) -> Iterator[None]:
    """A typed error in it is the cell's result, and any other names the cell."""
    try:
        yield
    except ProtocolError:
        raise  # of every cell alike
    except WorkspaceError as error:
        found[cell] = Refused(cell, error.problem, error.remedy)
    except Exception as error:
        error.add_note(f"in the sweep's cell: {cell}")
        raise
