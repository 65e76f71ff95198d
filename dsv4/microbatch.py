"""One micro-batch: its streams, its leases, and how a layer's nodes become calls on a workspace."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from dsv4.plan import PLACE, Calls, Stages
from dsv4.stages import MAIN
from dsv4.topology import AUX_STREAMS, Acquire, Branch, Fork, Node, Op, Release

ALIGNMENT = 256
"""Tensors of a layout are padded to this; the padding belongs to the lease."""

Range = tuple[int, int]
"""(address, bytes)."""

ByLease = tuple[tuple[int, tuple[str, ...]], ...]

Fetch = tuple[tuple[int, tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]] | None], ...]
"""The same, with a getter of all the tensors where there are several."""

RANGES_KEPT = 64
"""Byte ranges a launch remembers, by the addresses of its leases."""


class MicroBatch:
    """Compiles nodes to calls that act on the present lease of each stage.

    Parameters
    ----------
    ws
        The workspace.
    index
        0 or 1: each micro-batch has streams and persistent tensors of its own.
    persistent
        Shape and dtype of the tensors that live as long as the workspace.

    Attributes
    ----------
    bases
        Address of each lease in its place, 0 where tensors come from the allocator. Place 0 has the stages'
        serial.
    capture
        The capture whose segments an eager region divides, while there is one.
    plan
        What eager regions of a replay run now.
    """

    def __init__(self, ws: Any, index: int, persistent: dict[str, Any]) -> None:
        suffix = f".{index}" if index else ""
        self.ws = ws
        self.index = index
        self.main = ws.stream(MAIN + suffix)
        self.streams = {name: ws.stream(name + suffix) for name in AUX_STREAMS} | {MAIN: self.main}
        self.bases: list[int] = [0] * (len(PLACE) + 1)
        self.capture: Any = None
        self.plan: Any = None
        self._launch = ws.device.launch
        self._unjoined: frozenset[Branch] = frozenset()
        self._stages: Stages | None = None
        self._leases: list[Any] = []
        self._extents: list[dict[str, tuple[int, int]]] = []
        self._single: list[dict[str, Any]] = [{} for _ in self.bases]
        with ws.on(self.main):
            for name, (shape, dtype) in persistent.items():
                tensor = ws.persistent(name + suffix, shape, dtype)
                self._single[0][name] = (tensor.data_ptr(), tensor.nbytes)

    def enter(self, stages: Stages) -> None:
        """The next calls are a layer's with these leases."""
        self._stages = stages
        self._leases = stages.leases
        self._extents = stages.extents
        self.bases[0] = stages.serial

    def lease(self, name: str) -> Any:
        """The present lease of a stage, by its name in the topology."""
        return self._leases[PLACE[name]]

    # -- nodes to calls ----------------------------------------------------------------------------------
    def compile(self, nodes: tuple[Node, ...], unjoined: frozenset[Branch] = frozenset()) -> Calls:
        """Calls that enqueue the nodes in order.

        No join waits for a branch in `unjoined`; its uses are declared by hand.
        """
        self._unjoined = unjoined
        return self._compile(nodes)

    def _compile(self, nodes: tuple[Node, ...]) -> Calls:
        return tuple(self._call(node) for node in nodes)

    def _call(self, node: Node) -> Callable[[], object]:
        if isinstance(node, Op):
            return self._run(node)
        if isinstance(node, Acquire):
            return self._acquire(node)
        if isinstance(node, Release):
            return self._release(node)
        return self._fork(node) if isinstance(node, Fork) else self._break()

    def _acquire(self, node: Acquire) -> Callable[[], object]:
        place, bases = PLACE[node.lease], self.bases

        def acquire() -> None:
            lease = self._leases[place]
            lease.__enter__()
            address = bases[place] = lease.address
            if not address:
                self._single[place] = {}

        return acquire

    def _release(self, node: Release) -> Callable[[], object]:
        place = PLACE[node.lease]
        return lambda: self._leases[place].__exit__(None, None, None)

    def _run(self, op: Op) -> Callable[[], object]:
        touched = by_lease(op.reads), by_lease(op.writes)
        places = sorted({place for place, _ in touched[0] + touched[1] if place})
        key_of = itemgetter(0, *places) if places else itemgetter(0)
        bases, launch, label, tensors = self.bases, self._launch, op.label, self._tensors
        known: dict[Any, tuple[Any, Any]] = {}
        present: dict[int, tuple[ByLease, ByLease]] = {}
        fetches: dict[int, tuple[Fetch, Fetch]] = {}

        def run() -> None:
            key = key_of(bases)
            found = known.get(key)
            if found is None:
                stage = bases[0]
                if stage not in present:
                    if len(present) >= RANGES_KEPT:
                        present.clear()
                        fetches.clear()
                    reads, writes = self._present(touched[0]), self._present(touched[1])
                    present[stage], fetches[stage] = (reads, writes), (fetch(reads), fetch(writes))
                if not places or 0 not in key:
                    if len(known) >= RANGES_KEPT:
                        known.clear()
                    reads, writes = present[stage]
                    found = known[key] = self._ranges(reads), self._ranges(writes)
                else:
                    fetch_reads, fetch_writes = fetches[stage]
                    found = tensors(fetch_reads), tensors(fetch_writes)
            launch(label, found[0], found[1])

        return run

    def _fork(self, node: Fork) -> Callable[[], object]:
        joined = [branch for branch in node.branches if branch not in self._unjoined]
        loose = [branch for branch in node.branches if branch in self._unjoined]
        branches = [(self.streams[branch.stream], self._compile(branch.nodes)) for branch in joined]
        apart = [(self.streams[branch.stream], self._compile(branch.nodes)) for branch in loose]
        body, first = self._compile(node.body), node.branches_first
        fork, streams = self.ws.fork, [stream for stream, _ in branches]

        def forked() -> None:
            for stream, calls in apart:
                self._leave_unjoined(stream, calls)
            if not streams:
                for call in body:
                    call()
                return
            with fork(*streams) as branch:
                if not first:
                    for call in body:
                        call()
                for stream, calls in branches:
                    with branch(stream):
                        for call in calls:
                            call()
                if first:
                    for call in body:
                        call()

        return forked

    def _leave_unjoined(self, stream: Any, calls: Calls) -> None:
        event = self.ws.event()
        event.record()
        with self.ws.on(stream):
            event.wait()
            for call in calls:
                call()
        for lease in self._held():
            lease.use(stream)

    # -- eager regions -----------------------------------------------------------------------------------
    def _break(self) -> Callable[[], object]:
        def broken() -> None:
            self._complete()
            kind, bases = self._stages.kind, self.bases[1:]  # type: ignore[union-attr]
            single = [dict(one) for one in self._single]

            def region() -> None:
                plan = self.plan
                self.enter(plan.stages[kind])
                self.bases[1:] = bases
                self._single = [dict(one) for one in single]
                for call in plan.regions[kind]:
                    call()

            self.capture.eager_break(region)

        return broken

    def _complete(self) -> None:
        """Allocate what held leases still lack: an eager region writes it, and the graph reads it there."""
        for place, lease in enumerate(self._leases):
            if lease is not None and not lease.released and not self.bases[place]:
                self._allocated(place, tuple(self._extents[place]))

    # -- bytes -------------------------------------------------------------------------------------------
    def _held(self) -> list[Any]:
        return [lease for lease in self._leases if lease is not None and not lease.released]

    def _present(self, touched: ByLease) -> ByLease:
        """Without the tensors that have no bytes in the present stages."""
        found = []
        for place, names in touched:
            there = self._extents[place] if place else self._single[0]
            found.append((place, tuple(name for name in names if name in there)))
        return tuple((place, names) for place, names in found if names)

    def _ranges(self, touched: ByLease) -> tuple[Range, ...]:
        """Byte ranges of tensors; neighbours in one lease are joined across the padding between them."""
        found: list[Range] = []
        for place, names in touched:
            if not place:
                found += [self._single[0][name] for name in names]
                continue
            extents, base = self._extents[place], self.bases[place]
            end = -ALIGNMENT
            for offset, nbytes in sorted(extents[name] for name in names):
                if offset - end < ALIGNMENT:
                    start = found.pop()[0]
                else:
                    start = base + offset
                end = offset + nbytes
                found.append((start, base + end - start))
        return tuple(found)

    def _tensors(self, fetched: Fetch) -> list[Any]:
        """Tensors that come from the allocator, made by their first use on that use's stream."""
        found: list[Any] = []
        single = self._single
        for place, names, several in fetched:
            known = single[place]
            if several is None:
                name = names[0]
                tensor = known.get(name)
                if tensor is None:
                    tensor = known[name] = self._leases[place].allocate(name)[0]
                found.append(tensor)
                continue
            if names[0] in known:
                try:
                    found += several(known)
                    continue
                except KeyError:
                    pass  # one of the others is missing still
            found += self._allocated(place, names)
        return found

    def _allocated(self, place: int, names: tuple[str, ...]) -> list[Any]:
        tensors = self._leases[place].allocate(*names)
        self._single[place].update(zip(names, tensors))  # noqa: B905  (as many as were named)
        return tensors


def by_lease(names: tuple[str, ...]) -> ByLease:
    """Tensors grouped by the place of their lease; place 0 holds the persistent ones."""
    found: dict[int, list[str]] = {}
    for name in names:
        lease, tensor = name.split(".")
        found.setdefault(PLACE.get(lease, 0), []).append(tensor)
    return tuple((place, tuple(tensors)) for place, tensors in found.items())


def fetch(touched: ByLease) -> Fetch:
    """Tensors by lease, made ready to be taken from a dict."""
    return tuple((place, names, itemgetter(*names) if len(names) > 1 else None) for place, names in touched)
