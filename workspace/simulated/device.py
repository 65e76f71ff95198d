"""The simulated device: streams, events, memory, captures and a judge, without a GPU.

How an executor plugs in (``execution="deferred"``)
---------------------------------------------------
``with device:`` enters the calling thread into the executor (`workspace.simulated.threads`). The executor
turns each torch operator into one call ``device.launch(label, reads, writes, fn)``, made in the thread that
enqueues, on its current stream. `fn` takes no arguments and is dropped after it ran. It works on aliases of
the tensors' bytes that pin the segment (``device.memory.segment``) and not the block, so that a freed block
is handed out again at once.

The device makes a `Node` (stream, label, kind, fn, reads, writes, deps) and pushes it to ``device.queue``.
Nodes of one stream run in order; a wait is a node whose ``deps`` are the nodes before the record.
``device.drain(until, schedule)`` runs nodes: the schedule (`workspace.simulated.schedule`) chooses among the
streams whose head is runnable. The queue drains by itself at synchronisation, by one node at each query that
finds an event pending, and in the bursts the schedule asks for after an enqueue. ``device.queue.execute`` is
the hook that runs one node: replace it to set up modes around ``node.fn()``. Memory operations of the library
(`memset`) and graph replays are nodes as well. The judge logs a node when it is enqueued, so its verdict does
not depend on the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from workspace import watching
from workspace.errors import DeviceError
from workspace.simulated.capturing import Capturing
from workspace.simulated.driver import SimulatedDriver
from workspace.simulated.engine import Execution
from workspace.simulated.late import LateAccess
from workspace.simulated.lendings import Use, hand_out, late_uses
from workspace.simulated.memory import Kind
from workspace.simulated.node import Node
from workspace.simulated.race import Race
from workspace.simulated.ranges import ranges_of
from workspace.simulated.schedule import Random, Schedule
from workspace.simulated.sites import ACQUIRE, call_site

if TYPE_CHECKING:
    import torch

    from workspace.simulated.executor import Executor
    from workspace.simulated.threads import Presence


FINISHED = Node(0, 0, {}, "launch", "finished")
"""What `launch` returns when nobody will ask about the node: no log, and it has run."""
FINISHED.done = True

UNSHOWN = (
    "no operation was shown to the device: run torch's inside `with device:` on one of execution='deferred', or pass "
    "each to device.launch"
)
"""Fills and uploads of the library are none: it makes them without `with device:`, too."""

Verdict = Literal["SAFE", "UNSAFE", "UNKNOWN"]


class Device(Capturing):
    """A device of virtual streams.

    Parameters
    ----------
    memory
        ``host``: real bytes, tensors are CPU tensors. ``virtual``: addresses and sizes only, tensors are
        `VirtualTensor`.
    seed
        Seeds the default schedule of deferred execution.
    log
        Log accesses and judge their order; without, the verdict is UNKNOWN.
    execution
        ``immediate``: an operation runs when launched. ``deferred``: it waits for a schedule (see the
        module).
    sites
        Record the call site of each operation, for reports.
    capacity
        Bytes of device memory, None for no bound.
    ahead
        In immediate execution, how many operations the host runs ahead of the device: an event is complete,
        for queries and for the caching allocator, once so many more were enqueued after its record.
    schedule
        Schedule of deferred execution; default ``Random(seed)``.
    """

    def __init__(
        self,
        memory: Kind = "host",
        seed: int = 0,
        log: bool = True,
        execution: Execution = "immediate",
        *,
        sites: bool = False,
        capacity: int | None = None,
        ahead: int = 0,
        schedule: Schedule | None = None,
    ) -> None:
        for what, given, allowed in (
            ("memory", memory, get_args(Kind)),
            ("execution", execution, get_args(Execution)),
        ):
            if given not in allowed:
                raise DeviceError(f"{what}={given!r} is not known", f"use {' or '.join(map(repr, allowed))}")
        super().__init__(memory, capacity, execution, log, sites, ahead, schedule or Random(seed))
        self.seed = seed
        self.executor: Executor | None = None
        self._executing: Presence | None = None
        self._driver = SimulatedDriver(self)

    def __repr__(self) -> str:
        return f"simulated.Device(memory={self.memory.kind!r}, execution={self.execution!r}, seed={self.seed})"

    # -- work ----------------------------------------------------------------------------------------------

    def launch(
        self,
        label: str,
        reads: Iterable[Any] = (),
        writes: Iterable[Any] = (),
        fn: Callable[[], Any] | None = None,
        stream: int | None = None,
    ) -> Node:
        """Enqueue one operation.

        Parameters
        ----------
        label
            Names it in reports.
        reads, writes
            Bytes it touches: tensors, virtual tensors, (address, nbytes) pairs, or objects with
            ``__workspace_range__() -> (address, nbytes)``.
        fn
            Called when the operation runs; in a capture, at each replay.
        stream
            Key; the calling thread's current stream if omitted.
        """
        with self.lock:
            self.counters["launch"] += 1
            state = self.streams[self.streams.current() if stream is None else stream]
            if self.judge is None and not self.deferred and state.capture is None and not self.streams.blocking:
                self.tick += 1
                if fn is not None:
                    fn()
                return FINISHED
            reads, writes = tuple(reads), tuple(writes)
            node = self.submit(state, "launch", label, ranges_of(reads), ranges_of(writes), fn)
            lent = late_uses(reads, writes)
            return self.judged(node, lent) if lent else node

    def judged(self, node: Node, lent: Sequence[Use]) -> Node:
        """A node, whose uses of what has been lent again are judged, too."""
        if lent and self.judge is not None:
            with self.lock:
                self.judge.used(node, lent)
        return node

    def memset(self, address: int, nbytes: int, value: int, stream: int | None = None) -> None:
        """Enqueue a fill with one byte value; a memory node when the stream is capturing."""
        with self.lock:
            self.counters["memset"] += 1
            if nbytes:
                state = self.state(stream)
                fill = self.memory.fill(address, nbytes, value)
                self.submit(state, "memset", "memset", (), ((address, nbytes),), fill)

    def upload(self, host: torch.Tensor, offset: int, address: int, nbytes: int, stream: int | None = None) -> None:
        """Enqueue a copy of bytes of host memory, which it reads when it runs."""
        watching.use(self)
        with self.lock:
            self.counters["upload"] += 1
            if nbytes:
                move = self.memory.move(host, offset, address, nbytes)
                self.submit(self.state(stream), "upload", "upload", (), ((address, nbytes),), move)

    def drain(self, until: Node | Callable[[], bool] | int | None = None, schedule: Schedule | None = None) -> None:
        """Let the device run until a node is done, a stream (key) is idle, a condition holds, or to the end.

        Unlike `synchronize` it teaches the host nothing, so it changes no verdict.
        """
        with self.lock:
            if isinstance(until, int):
                until = self.queue.last(until) or FINISHED
            self.queue.drain(until, schedule)

    def __enter__(self) -> Device:
        """Turn torch operations into operations of this device (deferred execution only)."""
        if not self.deferred:
            raise DeviceError(
                "`with device:` on a device with execution='immediate' would record no operation of torch",
                "make it with execution='deferred', or pass operations to launch() without entering",
            )
        self._presence().enter()
        return self

    def __exit__(self, *error: Any) -> None:
        self._presence().exit()

    def _presence(self) -> Presence:
        with self.lock:
            if self._executing is None:
                from workspace.simulated.executor import Executor
                from workspace.simulated.threads import Presence

                self._executing = Presence(Executor(self))
            return self._executing

    # -- the judge -----------------------------------------------------------------------------------------

    def label_range(self, address: int, nbytes: int, owner: str) -> None:
        """From now on, reports name `owner` for these bytes."""
        with self.lock:
            if self.judge is not None:
                self.judge.owners.label(self.tick + 1, address, nbytes, owner)

    def lend(self, address: int, nbytes: int, owner: str, tensors: list[Any] | None = None) -> None:
        """Lend bytes, so that an access by a tensor of an earlier lease of them is late; reports name `owner`.

        `tensors`: each is replaced by another over the same bytes, for this lease alone. What is lent while a capture
        is open is never late: a replay's eager breaks use it again, in whatever turn.
        """
        with self.lock:
            if self.judge is not None and nbytes:
                self.judge.owners.label(self.tick + 1, address, nbytes, owner)
                lending = self.judge.lendings.lend(address, nbytes, owner, call_site(ACQUIRE) if self.sites else ())
                hand_out(tensors or [], None if self.captures else lending)

    def judges(self, driver: object) -> bool:
        """Whether a driver is this device's: the streams and leases of its workspaces are known here."""
        return getattr(driver, "simulated", None) is self

    def unknown(self, reason: str) -> None:
        """Something happened that the device does not model: the verdict can no longer be SAFE."""
        with self.lock:
            if self.judge is not None:
                self.judge.unmodelled[reason] += 1

    def races(self) -> list[Race]:
        """Pairs of conflicting accesses that no edge orders.

        Every access that races is found, with the last access to those bytes on each side. The first races are reported
        exhaustively; of many that differ in their bytes only, sixteen are kept and the rest counted.
        """
        with self.lock:
            return [] if self.judge is None else self.judge.races()

    def late(self) -> list[LateAccess]:
        """Accesses by a tensor of a lease to bytes that have been lent again since, in order or not.

        Seen are the tensors that a pool's lease hands out, and views of them: those that torch makes inside
        ``with device:``, and those of virtual tensors; but not what ``set_`` or ``torch.nn.Parameter`` makes of them.
        Of many alike one is kept and the rest counted.
        """
        with self.lock:
            return [] if self.judge is None else self.judge.late()

    def verdict(self) -> Verdict:
        """``UNSAFE`` with a race or a late access, ``UNKNOWN`` for any other of the `reasons`, else ``SAFE``.

        It speaks of the accesses the device was shown: operations of torch with ``execution="deferred"`` and inside
        ``with device:``, others where they are passed to `launch`. Where no operation was, it is ``UNKNOWN``; so it is
        where a workspace of another device was used inside ``with device:``, whose streams are not known here.
        """
        with self.lock:
            if self.races() or self.late():
                return "UNSAFE"
            return "UNKNOWN" if self.reasons() else "SAFE"

    def reasons(self) -> list[str]:
        """Why it is not ``SAFE`` where no race was found.

        Late accesses; no log; what is not modelled; workspaces of other devices that lent inside ``with device:``, each
        by name, and that their streams were used there; no operation shown.
        """
        with self.lock:
            if self.judge is None:
                return ["the device keeps no log"]
            late = [str(one) for one in self.judge.late()]
            return [*late, *self.judge.unmodelled, *([] if self.counters["launch"] else [UNSHOWN])]

    def driver(self) -> SimulatedDriver:
        """The seam's view of this device, always the same object."""
        return self._driver
