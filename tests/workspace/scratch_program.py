"""What a random program has on loan, and the laws that every safe strategy keeps.

The program itself is race-free: a lease is written once, by its acquirer, and read only on streams that were made to
come after that write and were declared. Any race is then the library's.
"""

from __future__ import annotations

import gc
from typing import Any

import attrs
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant

from tests.workspace.bookkeeping import check_books, check_coalesced
from tests.workspace.scene import BYTES, MIB, OTHER, scene
from workspace import Lease
from workspace.errors import CapacityError
from workspace.graph import Graph

STREAMS = 4
STATEFUL = settings(
    derandomize=True, deadline=None, max_examples=40, stateful_step_count=35, database=None,
    phases=[Phase.generate], report_multiple_bugs=False,
)  # fmt: skip


@attrs.define(eq=False)
class Live:
    """A lease on loan, with the streams that may read it: its write precedes their next work, and they are declared."""

    lease: Lease
    tensor: Any
    readers: set[int]


class ScratchProgram(RuleBasedStateMachine):
    """Four streams and what is on loan there; the rules are `ScratchMachine`'s.

    `full`: it begins locked, in a pool of just what was declared, all of which was cut for the first lease.
    """

    strategy = "event_fenced"
    steady = False
    full = False
    config: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        # Rules run outside pytest's fixtures of the single test.
        torch.set_grad_enabled(False)
        self.device, self.ws = scene(self.strategy, steady=self.steady, reserve=4 * MIB, **self.config)
        self.streams = [self.ws.stream(f"s{index}") for index in range(STREAMS - 1)]
        raw = self.device.new_raw_stream("raw")
        self.streams.append(self.ws.timeline.of(raw))
        self.live: list[Live] = []
        self.singles: list[tuple[Any, int]] = []
        self.events = [self.ws.event() for _ in range(2)]
        self.graphs: list[tuple[Graph, set[int]]] = []
        self.locked = self.full
        if self.full:
            self.ws.lock()
            self.ws.acquire(BYTES, N=4 * MIB).release()

    @property
    def may_refuse(self) -> bool:
        """Whether a request that finds no bytes is refused rather than served by growth."""
        return self.locked or "capacity" in self.config or self.config.get("policy") == "fence"

    # -- what the rules share --------------------------------------------------------------------------------
    def pick(self, choice: int) -> Live | None:
        return self.live[choice % len(self.live)] if self.live else None

    def acquire_here(self, nbytes: int, stream: int, other: bool = False) -> Live | None:
        """A lease on the current stream, which is `stream`, written there."""
        layout = OTHER if other else BYTES
        try:
            lease = self.ws.acquire(layout, N=nbytes)
        except CapacityError:
            assert self.may_refuse
            return None
        tensor = lease.y if other else lease.x
        self.device.launch("write", writes=[tensor])
        found = Live(lease, tensor, {stream})
        self.live.append(found)
        return found

    def read(self, live: Live) -> None:
        """Read on the current stream."""
        self.device.launch("read", reads=[live.tensor])

    def release(self, live: Live, again: bool = False) -> None:
        """Give a lease back; `again`: its stream wants as much at once, so that the bytes themselves are reused."""
        self.live.remove(live)
        live.lease.release()
        if again:
            stream = live.lease.stream
            with self.ws.on(stream):
                self.acquire_here(live.lease.nbytes, self.streams.index(stream))

    def edge(self, first: int, second: int, event: int) -> None:
        self.events[event].record(self.streams[first])
        self.events[event].wait(self.streams[second])

    # -- the laws --------------------------------------------------------------------------------------------
    @invariant()
    def safe(self) -> None:
        """No two conflicting accesses without an edge between them."""
        races = self.device.races()
        assert not races, f"UNSAFE: {races[0]}"

    @invariant()
    def apart(self) -> None:
        """Bytes on loan overlap nothing else on loan."""
        ranges = [(int(live.tensor.data_ptr()), live.lease.nbytes) for live in self.live]
        ranges += [(int(tensor.data_ptr()), nbytes) for tensor, nbytes in self.singles]
        ranges.sort()
        for (start, nbytes), (after, _) in zip(ranges, ranges[1:], strict=False):
            assert start + nbytes <= after

    @invariant()
    def books(self) -> None:
        """Bytes are neither lost nor counted twice."""
        snapshot = self.ws.snapshot()
        check_books(self.ws)
        on_loan = sum(live.lease.request.nbytes for live in self.live)
        on_loan += sum(-(-nbytes // 256) * 256 for _, nbytes in self.singles)
        assert snapshot.allocated >= on_loan
        if not any(graph.pins and graph.pins.kept for graph, _ in self.graphs):
            assert snapshot.allocated == on_loan
            assert sum(owner.allocated for owner in snapshot.owners.values()) == on_loan

    def teardown(self) -> None:
        while self.live:
            self.release(self.live[-1])
        self.singles.clear()
        while self.graphs:
            self.graphs.pop()[0].release()
        check_coalesced(self.ws)
        self.ws.synchronize()
        self.safe()
        assert self.ws.snapshot().allocated == 0
        self.ws.unlock()
        self.ws.close()
        gc.collect()
        closed = self.ws.snapshot()
        assert closed.reserved == 0, closed
