"""Random programs on a judged device: leases, forks, events, captures, replays and changes of size on four streams."""

from __future__ import annotations

import gc

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.workspace.scene import BYTES, MIB, OTHER
from tests.workspace.scratch_program import STREAMS, Live, ScratchProgram
from workspace import Lease
from workspace.errors import CapacityError, CaptureError, LockError, SleepError

streams = st.integers(0, STREAMS - 1)
choices = st.integers(0, 7)
sizes = st.sampled_from([1, 256, 300, 4096, 100_000, MIB, 2 * MIB, 5 * MIB // 2])


class ScratchMachine(ScratchProgram):
    """The rules."""

    # -- rules: one stream -----------------------------------------------------------------------------------
    @rule(stream=streams, nbytes=sizes, other=st.booleans())
    def acquire(self, stream: int, nbytes: int, other: bool) -> None:
        with self.ws.on(self.streams[stream]):
            self.acquire_here(nbytes, stream, other)

    @rule(stream=streams, nbytes=sizes, times=st.integers(1, 3))
    def scoped(self, stream: int, nbytes: int, times: int) -> None:
        """The steady pattern: the same lease again and again."""
        with self.ws.on(self.streams[stream]):
            for _ in range(times):
                try:
                    with self.ws.lease(BYTES, N=nbytes) as lease:
                        self.device.launch("write", writes=[lease.x])
                        self.device.launch("read", reads=[lease.x])
                except CapacityError:
                    assert self.may_refuse

    @rule(choice=choices, stream=streams, again=st.booleans())
    def give_back(self, choice: int, stream: int, again: bool) -> None:
        """A release while any stream is current."""
        live = self.pick(choice)
        if live is not None:
            with self.ws.on(self.streams[stream]):
                self.release(live, again)

    @rule(stream=st.integers(0, STREAMS - 2), nbytes=sizes)
    def single(self, stream: int, nbytes: int) -> None:
        with self.ws.on(self.streams[stream]):
            try:
                tensor = self.ws.empty((nbytes,), torch.uint8)
            except CapacityError:
                assert self.may_refuse
                return
            self.device.launch("write", writes=[tensor])
        self.singles.append((tensor, nbytes))

    @precondition(lambda self: self.singles)
    @rule(choice=choices)
    def single_dies(self, choice: int) -> None:
        self.singles.pop(choice % len(self.singles))

    # -- rules: several streams ------------------------------------------------------------------------------
    @rule(choice=choices, stream=streams, event=st.integers(0, 1), declare_first=st.booleans())
    def use_elsewhere(self, choice: int, stream: int, event: int, declare_first: bool) -> None:
        """Another stream comes after the write and reads; the declaration may come before or after the launch."""
        live = self.pick(choice)
        if live is None:
            return
        if stream not in live.readers:
            writer = next(iter(live.readers & {self.streams.index(live.lease.stream)}))
            self.edge(writer, stream, event)
        if declare_first:
            self.ws.use(live.tensor, self.streams[stream])
        with self.ws.on(self.streams[stream]):
            self.read(live)
        if not declare_first:
            live.lease.use(self.streams[stream])
        live.readers.add(stream)

    @rule(choice=choices, reader=choices)
    def read_again(self, choice: int, reader: int) -> None:
        """A declared stream reads as often as it likes before the release."""
        live = self.pick(choice)
        if live is not None:
            readers = sorted(live.readers)
            with self.ws.on(self.streams[readers[reader % len(readers)]]):
                self.read(live)

    @rule(first=streams, second=streams, event=st.integers(0, 1))
    def order(self, first: int, second: int, event: int) -> None:
        self.edge(first, second, event)

    @rule(event=st.integers(0, 1), wait=st.booleans())
    def host_event(self, event: int, wait: bool) -> None:
        if wait:
            self.events[event].synchronize()
        else:
            self.events[event].query()

    @rule(stream=st.integers(0, STREAMS))
    def synchronize(self, stream: int) -> None:
        if stream == STREAMS:
            self.ws.synchronize()
        else:
            self.ws.synchronize(self.streams[stream])

    @rule(
        parent=streams,
        branches=st.lists(streams, min_size=1, max_size=2, unique=True),
        inner=st.booleans(),
        nbytes=sizes,
        keep=st.booleans(),
        drop=st.one_of(st.none(), choices),
        visit=st.one_of(st.none(), choices),
    )
    def fork(
        self,
        parent: int,
        branches: list[int],
        inner: bool,
        nbytes: int,
        keep: bool,
        drop: int | None,
        visit: int | None,
    ) -> None:
        """Branches read what the parent may read, lease, and maybe keep what they leased until after the join.

        `visit`: they also read a lease of a stream that the parent only comes after.
        """
        branches = [branch for branch in branches if branch != parent]
        with self.ws.on(self.streams[parent]):
            readable = [live for live in self.live if parent in live.readers]
            visited = self.pick(visit) if visit is not None else None
            if visited is not None and visited not in readable:
                self.edge(self.streams.index(visited.lease.stream), parent, 0)
                readable.append(visited)
            made: list[Live] = []
            with self.ws.fork(*(self.streams[branch] for branch in branches)) as branch:
                for number in branches:
                    with branch(self.streams[number]):
                        for live in readable:
                            self.read(live)
                        self.leases_in_branch(number, nbytes, keep, made)
                        if inner:
                            self.fork_inside(parent, number, branches, readable)
                if drop is not None:
                    dropped = self.pick(drop)
                    if dropped is not None and dropped not in made:
                        self.release(dropped, again=True)
            for live in made:
                live.readers.add(parent)
                self.read(live)

    def leases_in_branch(self, number: int, nbytes: int, keep: bool, made: list[Live]) -> None:
        live = self.acquire_here(nbytes, number)
        if live is not None and keep:
            made.append(live)
        elif live is not None:
            self.release(live)

    def fork_inside(self, parent: int, number: int, branches: list[int], readable: list[Live]) -> None:
        """A fork in a branch, to a stream that is none of the outer one's or is a sibling."""
        inner = next((one for one in range(STREAMS) if one not in (parent, number)), None)
        assert inner is not None
        with self.ws.fork(self.streams[inner]) as deeper:
            with deeper(self.streams[inner]):
                for live in readable:
                    if live in self.live:
                        self.read(live)
        if inner in branches:
            # The sibling goes on after the inner join.
            with self.ws.on(self.streams[inner]):
                for live in readable:
                    if live in self.live:
                        self.read(live)

    # -- rules: captures and graphs --------------------------------------------------------------------------
    @rule(
        stream=streams,
        sizes=st.lists(st.sampled_from([256, 4096, 100_000]), min_size=1, max_size=3),
        forked=st.booleans(),
        broken=st.booleans(),
        fails=st.booleans(),
        lane=st.sampled_from(["main", "draft"]),
    )
    def capture(self, stream: int, sizes: list[int], forked: bool, broken: bool, fails: bool, lane: str) -> None:
        """A graph that leases, reads what was leased before it, maybe forks, breaks, or fails."""
        aux = (stream + 1) % (STREAMS - 1)
        kept = [live for live in self.live if live.readers >= {stream}]
        with self.ws.on(self.streams[stream]):
            try:
                with self.ws.capture(lane) as capture:
                    for live in kept:
                        self.read(live)
                    for nbytes in sizes:
                        with self.ws.lease(BYTES, N=nbytes) as lease:
                            self.device.launch("captured write", writes=[lease.x])
                            if forked and aux != stream:
                                self.captured_fork(aux, lease, nbytes)
                            if broken and nbytes == sizes[0]:
                                capture.eager_break(self.eager)
                            self.device.launch("captured read", reads=[lease.x])
                    if fails:
                        raise KeyError
            except (CaptureError, KeyError):
                return
        self.graphs.append((capture.graph, {self.streams.index(live.lease.stream) for live in kept}))

    def captured_fork(self, aux: int, lease: Lease, nbytes: int) -> None:
        with self.ws.fork(self.streams[aux]) as branch:
            with branch(self.streams[aux]):
                self.device.launch("branch read", reads=[lease.x])
                with self.ws.lease(BYTES, N=nbytes) as other:
                    self.device.launch("branch write", writes=[other.x])
            with self.ws.lease(BYTES, N=2 * nbytes) as other:
                self.device.launch("parent write", writes=[other.x])

    def eager(self) -> None:
        """Host code between two segments: it leases outside the footprint."""
        try:
            with self.ws.lease(OTHER, N=4096) as lease:
                self.device.launch("eager", writes=[lease.y])
        except CapacityError:
            assert self.may_refuse

    @precondition(lambda self: self.graphs)
    @rule(replays=st.lists(st.tuples(choices, streams), min_size=1, max_size=3))
    def replay(self, replays: list[tuple[int, int]]) -> None:
        """Replays read leases of before the capture: the launch stream comes after their writes."""
        for choice, stream in replays:
            graph, writers = self.graphs[choice % len(self.graphs)]
            for writer in sorted(writers - {stream}):
                self.edge(writer, stream, 0)
            graph.replay(self.streams[stream])

    @precondition(lambda self: self.graphs)
    @rule(choice=choices, drop=st.booleans())
    def release_graph(self, choice: int, drop: bool) -> None:
        graph, _ = self.graphs.pop(choice % len(self.graphs))
        if drop:
            del graph
            gc.collect()
        else:
            graph.release()

    # -- rules: size -----------------------------------------------------------------------------------------
    @rule()
    def trim(self) -> None:
        self.ws.trim()

    @rule(nbytes=sizes, settled=st.booleans())
    def nap(self, nbytes: int, settled: bool) -> None:
        """Sleep, memory for somebody else meanwhile, and wake; what is on loan stands against it, and only that."""
        if settled and self.graphs:
            while self.live:
                self.release(self.live[-1])
            self.singles.clear()
        held = self.ws.snapshot()
        try:
            self.ws.sleep()
        except SleepError:
            assert self.live or self.singles
            assert self.ws.snapshot() == held
            return
        assert not self.singles and not any(live.lease.nbytes for live in self.live)
        assert self.ws.snapshot().reserved == 0 and self.device.memory.used <= self.device.statistics.reserved
        beside = self.device.empty((nbytes,), torch.uint8)
        self.device.launch("beside", writes=[beside])
        self.ws.wake()
        assert self.ws.snapshot().reserved == held.reserved - held.retired
        self.graphs = [entry for entry in self.graphs if entry[0].refusal is None]

    @rule(lock=st.booleans())
    def lock(self, lock: bool) -> None:
        if lock:
            self.ws.lock()
            self.locked = True
        else:
            try:
                self.ws.unlock()
                self.locked = False
            except LockError:
                assert self.graphs
