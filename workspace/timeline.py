"""One timeline for each device and process: the lock, the clocks, and the one function that may record or wait."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from workspace.block import Block, Uses
from workspace.clocks import Clocks
from workspace.driver import Driver
from workspace.errors import CaptureError, DriverError, ProcessError, StreamError, WorkspaceError
from workspace.explain import Explanations
from workspace.holding import ThreadState
from workspace.process import ParentsDriver
from workspace.streams import Event, Stream

if TYPE_CHECKING:
    from workspace.capture import Capture
    from workspace.driver import Graph as DriverGraph
    from workspace.lease import Lease
    from workspace.pins import Pins

Answer = TypeVar("Answer")

new_lock: Callable[[], Any] = threading.RLock
"""What makes a timeline's lock; the C++ form has one that costs less (`workspace.native`)."""


class Timeline:
    """What all workspaces of a device share (target and draft model), under one lock.

    Attributes
    ----------
    lock
        Covers check, record, wait and hand-out. Finalisers do not take it: they append to `finished`.
    refusal
        When set, every acquire raises it: the process was forked, or the device reported a sticky error.
    captures
        Open captures by the driver's identity; empty on the steady path.
    busy
        Whether an acquire must take the long way: a capture is open or may be, finalisers left something, or
        everything is refused.
    current_key
        The driver's ``current_stream``.
    opening
        The capture that `ws.capture` is just beginning: the driver's notice of it is no foreign one.
    query_captures
        Whether each acquire asks the driver, because captures may be begun by raw calls.
    deferred
        What `finished` holds and cannot be done while a capture is open.
    pins
        What the graphs that exist pin.
    unwaited
        Leases that finalisers have released, and that a wait for their collectives has failed for: tried again where
        bytes are needed, or looked at.
    """

    __slots__ = (
        "__weakref__", "_begun", "_by_id", "_named", "_pid", "_spent", "_starting", "_streams", "busy", "captures",
        "clocks", "current_key", "deferred", "driver", "explanations", "fences", "finished", "lock", "opening", "pins",
        "query_captures", "refusal", "state", "unwaited",
    )  # fmt: skip

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.clocks = Clocks()
        self.lock: Any = new_lock()
        self.refusal: WorkspaceError | None = None
        self.captures: dict[int, Capture] = {}
        self.opening: Capture | None = None
        self.query_captures = False
        self.busy = False
        self.current_key = driver.current_stream
        self.explanations = Explanations()
        self.finished: deque[Callable[[], None]] = deque()
        self.deferred: list[Callable[[], None]] = []
        self.state = ThreadState()
        self.pins: set[Pins] = set()
        self.unwaited: list[Lease] = []
        self.fences = 0
        self._begun = 0
        self._starting: set[int] = set()
        self._spent: deque[int] = deque()
        self._streams: dict[int, Stream] = {}
        self._named: dict[str, Stream] = {}
        self._by_id: dict[int, Stream] = {}
        self._pid = os.getpid()
        driver.watch_captures(self._beginning, self._began, self._ended)
        _TIMELINES.add(self)

    # -- streams ---------------------------------------------------------------------------------------------
    def named(self, name: str, communication: bool = False) -> Stream:
        """The stream of that name, created at first use."""
        with self.lock:
            found = self._named.get(name)
            if found is None:
                key = self.call(self.driver.new_stream, name)
                found = self._named[name] = self._add(key, name, communication)
            elif found.communication != communication:
                raise StreamError(
                    f"stream {name!r} exists with communication={found.communication}", "use one value for each name"
                )
            return found

    def of(self, stream: object) -> Stream:
        """The `Stream` behind any stream object, seen as it is outside captures.

        Raises `StreamError` for None: an omitted stream means the caller's current one, an explicit None is a bug.
        """
        if isinstance(stream, Stream):
            if self._by_id.get(stream.id) is not stream:
                raise StreamError(
                    f"{stream!r} belongs to another device, or to a capture that ended",
                    "pass a stream of this workspace's device",
                )
            return stream
        if stream is None:
            raise StreamError("stream=None", "omit the argument for the caller's current stream, or pass a stream")
        key = self.call(self.driver.stream_key, stream)
        return self._streams.get(key) or self._add(key, f"stream {key}")

    def all_of(self, streams: tuple[object, ...]) -> tuple[Stream, ...]:
        """The `Stream` behind each of some stream objects; see `of`."""
        known = self._by_id
        for one in streams:
            if type(one) is not Stream or known.get(one.id) is not one:
                return tuple(self.of(stream) for stream in streams)
        return streams  # type: ignore[return-value]

    def current(self) -> Stream:
        """The caller's current stream; inside a capture, the stream's second self there."""
        key = self.current_key()
        stream = self._streams.get(key) or self._add(key, "default" if key == 0 else f"stream {key}")
        if self.captures or self.query_captures:
            return self.inside(stream)
        return stream

    def outside(self, stream: Stream) -> Stream:
        """The stream as it is outside the capture its self belongs to."""
        return self._streams[stream.key]

    def inside(self, stream: Stream) -> Stream:
        """The stream's self in the capture it is part of, or the stream."""
        if stream.capture is not None:
            return stream
        identity = self.call(self.driver.capture_of, stream.key)
        if not identity:
            return stream
        capture = self.captures.get(identity)
        if capture is None:
            if not self.query_captures:
                raise CaptureError(
                    f"{stream.name} is part of a capture the library was not told of",
                    "begin it with ws.capture or torch.cuda.graph, or set foreign_captures='query'",
                )
            capture = self._foreign(identity, stream.key)
        return capture.stream(stream)

    def _add(self, key: int, name: str, communication: bool = False, capture: Capture | None = None) -> Stream:
        with self.lock:
            exact = communication or (capture is None and not self.driver.owned(key))
            clock = self.clocks.of[self.clocks.add()]
            stream = Stream(key, name, clock, communication=communication, exact=exact, capture=capture)
            self._by_id[stream.id] = stream
            if capture is None:
                self._streams[key] = stream
            return stream

    def into_capture(self, streams: tuple[Stream, ...], capture: Capture) -> tuple[Stream, ...]:
        """Selves of streams that are about to join a capture.

        Their uses so far get an event first: while a stream captures, nothing outside can record on it.
        """
        for stream in streams:
            if stream.capture is None and not self.call(self.driver.capture_of, stream.key):
                self.record(stream)
        return tuple(capture.stream(stream) for stream in streams)

    def captured_self(self, stream: Stream, capture: Capture) -> Stream:
        """A second self for a stream inside a capture, which has seen nothing."""
        return self._add(stream.key, stream.name, stream.communication, capture)

    def forget(self, streams: list[Stream]) -> None:
        """Drop the selves of a capture that ended: its edges order nothing outside."""
        self.clocks.forget(stream.id for stream in streams)
        for stream in streams:
            del self._by_id[stream.id]

    def at_work(self, capture: Capture | None) -> list[Stream]:
        """Every stream seen so far, inside a capture or outside of all: what ``strict_streams`` counts as users.

        Raw streams are left out: one may be gone by now, so its uses must be declared.
        """
        seen = self._streams.values() if capture is None else capture.streams()
        return [stream for stream in seen if stream.communication or not stream.exact]

    def stream_of(self, used: int) -> Stream:
        """The stream behind a clock id."""
        return self._by_id[used]

    # -- order -----------------------------------------------------------------------------------------------
    def last_epoch(self, stream: Stream) -> int:
        """The epoch of what has been enqueued last on the stream.

        That is its present one, but for a captured stream that has not joined the present segment: what it has done is
        over with the segments before, whose end has closed its epoch for all (`Capture.segment_ended`).
        """
        capture = stream.capture
        if capture is not None and capture.segment and not self.takes_part(stream.key, capture):
            return stream.clock.waited - 1  # the last that such an end has closed
        return stream.clock.epoch

    def takes_part(self, key: int, capture: Capture) -> bool:
        """Whether a stream has joined the capture's present segment; false between two segments."""
        return capture.identity != 0 and self.call(self.driver.capture_of, key) == capture.identity

    def ordered(self, block: Block, stream: Stream) -> bool:
        """The one rule: whether every last use of every byte of the block precedes the stream's next work."""
        ordered = self.clocks.ordered
        return all(ordered(stream.id, used, epoch) for used, epoch in block.uses.items())

    def fence(self, block: Block, stream: Stream) -> int:
        """Make the stream's next work come after every last use of the block. Returns the number of fences.

        The only function of the library that records or waits for the sake of a block. Raises `CaptureError` when an
        event would have to cross the border of a capture; nothing is handed out then.
        """
        made = 0
        for used, epoch in block.uses.items():
            if self.clocks.ordered(stream.id, used, epoch):
                continue
            owner = self._by_id[used]
            event = _recorded(block, used, epoch) if owner.capture is stream.capture else None
            self.wait(event or self._owed(owner, epoch, stream), stream)
            made += 1
        self.fences += made
        return made

    def follow(self, owner: Stream, epoch: int, event: Event | None, stream: Stream) -> None:
        """Make the stream's next work come after another's up to an epoch, by an event that covers it, if there is one.

        For bytes of the framework's allocator, which go by the stream they were allocated on.
        """
        if not self.clocks.ordered(stream.id, owner.id, epoch):
            self.wait(event or self._owed(owner, epoch, stream), stream)
            self.fences += 1

    def _owed(self, owner: Stream, epoch: int, waiter: Stream) -> Event:
        """An event covering a lazily stamped use: the stream's last one if it does, else recorded now."""
        same_side = owner.capture is waiter.capture
        if same_side and owner.last is not None and owner.last.epoch >= epoch:
            return owner.last
        if same_side and owner.capture is None and _may_be_gone(owner):
            raise StreamError(
                f"a use on {owner!r} got no event at its release, and {waiter!r} is to wait for it",
                "release leases before a stream they were used on is destroyed; ws.synchronize() shows the use over",
            )
        if not same_side or (owner.capture is None and self.call(self.driver.capture_of, owner.key)):
            raise CaptureError(
                f"a use on {owner!r} has no event yet, and {waiter!r} is on the other side of a capture",
                "reserve before the capture, so that it has bytes of its own",
                owner=owner.name, waiter=waiter.name,
            )  # fmt: skip
        return self.record(owner)

    def records(self, owner: Stream) -> bool:
        """Whether an event recorded on the stream now is of its own side of a capture."""
        capture = owner.capture
        if capture is None:
            return not self.call(self.driver.capture_of, owner.key)
        return not capture.segment or self.takes_part(owner.key, capture)

    def _recordable(self, owner: Stream) -> bool:
        """Whether an event can be recorded for past uses of a stream outside captures: not on one that may be gone."""
        return not _may_be_gone(owner) and not self.call(self.driver.capture_of, owner.key)

    def fenceable(self, block: Block, stream: Stream) -> bool:
        """Whether `fence` would succeed."""
        for used, epoch in block.uses.items():
            if self.clocks.ordered(stream.id, used, epoch):
                continue
            owner = self._by_id[used]
            if owner.capture is not stream.capture:
                return False
            recorded = _recorded(block, used, epoch) or (owner.last and owner.last.epoch >= epoch)
            if not recorded and owner.capture is None and not self._recordable(owner):
                return False
        return True

    def new_event(self) -> Event:
        while self._spent:
            self.call(self.driver.free_event, self._spent.popleft())
        return Event(self.call(self.driver.new_event), self._spent)

    def record(self, stream: Stream, event: Event | None = None) -> Event:
        """Record an event (the stream's own by default) that covers everything enqueued on it so far."""
        if event is None:
            # A captured record leaves the event unusable outside, so each self of a stream has its own event.
            event = stream.last or self.new_event()
            stream.last = event
        epoch = stream.clock.epoch
        covered = self.clocks.record(stream.id)
        try:
            self.driver.record(event.handle, stream.key)
        except DriverError as error:
            self.note(error)
            raise
        event.covered = covered
        event.epoch = epoch
        return event

    def wait(self, event: Event, stream: Stream) -> None:
        """Make the stream's later work wait for the event."""
        try:
            self.driver.wait(event.handle, stream.key)
        except DriverError as error:
            self.note(error)
            raise
        self.clocks.wait(stream.id, event.covered)

    def exact_event(self, stream: Stream) -> Event:
        """An event of its own for the uses so far, which later records do not move."""
        return self.record(stream, self.new_event())

    def exact_events(self, uses: Uses) -> dict[int, Event] | None:
        """Events, recorded now, for uses on streams that may be gone or spinning when somebody asks later."""
        events = {}
        for used in uses:
            owner = self._by_id[used]
            if owner.exact and self.records(owner):
                events[used] = self.exact_event(owner)
        return events or None

    def complete(self, block: Block) -> bool:
        """Whether the host knows that every last use of the block is over. Asks no device."""
        host = self.clocks.host
        return all(host.get(used, 0) >= epoch for used, epoch in block.uses.items())

    def settle(self, block: Block) -> bool:
        """Block the host until every last use of the block is over. False when a capture forbids it."""
        for used, epoch in block.uses.items():
            if self.clocks.host.get(used, 0) >= epoch:
                continue
            event = _recorded(block, used, epoch)
            owner = self._by_id[used]
            if event is None:
                event = owner.last if owner.last and owner.last.epoch >= epoch else None
                if owner.capture is not None or (event is None and not self._recordable(owner)):
                    return False
                event = event or self.record(owner)
            self.await_event(event)
        return True

    def await_event(self, event: Event) -> None:
        """Block the host until what an event covers is over. For events that nobody records anew meanwhile."""
        self.call(self.driver.synchronize_event, event.handle)
        with self.lock:
            self.clocks.complete(event.covered)

    def synchronize(self, stream: Stream | None = None) -> bool:
        """Block the host until a stream, or with None the device, is idle; the clocks remember it.

        The lock is not held while the host blocks. The covered epochs are taken before the device call: what other
        threads enqueue meanwhile is not claimed.

        Returns whether all that was enqueued before is over: on the device, not where a stream of it captures.
        """
        with self.lock:
            if stream is not None and (stream.capture is not None or self.call(self.driver.capture_of, stream.key)):
                raise CaptureError(f"{stream!r} is synchronised while it captures", "synchronise outside the capture")
            whole = stream is not None or not self._may_capture()
            streams = [stream] if stream is not None else self._idle_with_the_device()
            covered = [self.clocks.record(one.id) for one in streams]
            begun = self._begun
        self.call(self.driver.synchronize, stream.key if stream is not None else None)
        with self.lock:
            if stream is None and self._begun != begun:
                return False  # the driver leaves capturing streams out, and one began meanwhile: which is not known
            for seen in covered:
                self.clocks.complete(seen)
            if stream is None:
                self.clocks.settle()
        return whole

    def _may_capture(self) -> bool:
        """Whether some stream captures, or may without the library's knowledge."""
        return bool(self.captures or self._starting or self.query_captures)

    def _idle_with_the_device(self) -> list[Stream]:
        """Streams that are idle once the device is: while a capture is open, those the driver can wait for then."""
        if not self._may_capture():
            return list(self._streams.values())
        driver = self.driver
        return [
            one for one in self._streams.values() if driver.owned(one.key) and not self.call(driver.capture_of, one.key)
        ]

    def call(self, verb: Callable[..., Answer], *arguments: Any) -> Answer:
        """What a verb of the driver answers; every one that asks the device is called by this, or notes as it does."""
        try:
            return verb(*arguments)
        except DriverError as error:
            self.note(error)
            raise

    def note(self, error: DriverError) -> None:
        """After an error that the device keeps reporting, everything is refused."""
        if error.fields.get("sticky"):
            self.refusal = error
            self.refresh()

    # -- captures --------------------------------------------------------------------------------------------
    def _beginning(self, key: int) -> None:
        """Uses on the stream that have no event yet get one before it starts capturing."""
        with self.lock:
            self._begun += 1
            self._starting.add(key)
            stream = self._streams.get(key)
            if stream is not None:
                self.record(stream)

    def _began(self, key: int, identity: int) -> None:
        with self.lock:
            self._starting.discard(key)
            opening = self.opening
            if opening is not None and opening.origin.key == key:
                opening.identity = identity
                self.captures[identity] = opening
                self.refresh()
            elif identity not in self.captures:
                self._foreign(identity, key)

    def _foreign(self, identity: int, key: int) -> Capture:
        from workspace.capture import Capture

        stream = self._streams.get(key) or self._add(key, f"stream {key}")
        capture = self.captures[identity] = Capture(self, stream, identity, foreign=True)
        capture.keep_held()
        self.refresh()
        return capture

    def _ended(self, key: int, identity: int, graph: DriverGraph | None) -> None:
        with self.lock:
            capture = self.captures.get(identity)
            if capture is not None and capture.foreign:
                capture.close([graph] if graph is not None else None)

    def refresh(self) -> None:
        """Note a change of what `busy` stands for."""
        self.busy = bool(
            self.captures or self.query_captures or self.finished or self.deferred or self.refusal is not None
        )

    # -- host ------------------------------------------------------------------------------------------------
    def in_progress(self) -> bool:
        """Whether this thread is inside the lock already: the caller is a finaliser that interrupted it."""
        owned: bool = self.lock._is_owned()
        return owned

    def later(self, step: Callable[[], None]) -> None:
        """Leave something for the next acquire. For finalisers: takes no lock and calls no device."""
        self.finished.append(step)
        self.busy = True

    def ready(self) -> None:
        """Raise what stands against handing out bytes, else `drain`."""
        if self.refusal is not None:
            raise self.refusal
        if self.finished or self.deferred:
            self.drain()

    def settle_releases(self) -> None:
        """Let go of what graphs that are gone have pinned, as far as the driver knows by now.

        And of what `unwaited` leases have, where a wait succeeds.
        """
        self.driver.poll()
        self.drain()
        if self.unwaited and not self.captures:
            waiting, self.unwaited = self.unwaited, []
            try:
                while waiting:
                    waiting.pop(0)._wait_again()
            finally:
                self.unwaited += waiting

    def drain(self) -> None:
        """Run what finalisers left behind. Called with the lock held, before a placement."""
        failed: list[BaseException] = []
        while self.finished:
            _run(self.finished.popleft(), failed)
        if self.deferred and not self.captures:
            waiting, self.deferred = self.deferred, []
            for step in waiting:
                _run(step, failed)
        self.refresh()
        if failed:
            raise next((error for error in failed if not isinstance(error, Exception)), failed[0])

    def after_fork(self) -> None:
        """In a child process: the device context is the parent's, so everything is refused from now on."""
        self.lock = new_lock()
        self.refusal = refusal = ProcessError(
            f"this workspace belongs to process {self._pid}; this is its forked child {os.getpid()}",
            "create the workspace in the child, or start workers with the 'spawn' method",
            parent=self._pid,
        )
        self.driver = cast(Driver, ParentsDriver(self.driver, refusal))
        self.refresh()


def _run(step: Callable[[], None], failed: list[BaseException]) -> None:
    """Run a step whose error does not keep the others from being run: their bytes would be lost."""
    try:
        step()
    except BaseException as error:
        failed.append(error)


def _may_be_gone(stream: Stream) -> bool:
    """Whether it is a raw stream, whose owner may have destroyed it."""
    return stream.exact and not stream.communication


def _recorded(block: Block, used: int, epoch: int) -> Event | None:
    """The event recorded for a use, unless the stream has used the block again since."""
    event = block.events.get(used) if block.events else None
    return event if event is not None and event.epoch >= epoch else None


_TIMELINES: weakref.WeakSet[Timeline] = weakref.WeakSet()
_LOCK = threading.Lock()


def timeline_of(driver: Driver) -> Timeline:
    """The timeline of a driver, which is one for each device: all workspaces on it share clocks and lock."""
    with _LOCK:
        found: Timeline | None = getattr(driver, "_workspace_timeline", None)
        if found is None:
            found = Timeline(driver)
            driver._workspace_timeline = found  # type: ignore[attr-defined]
        return found


def _forked() -> None:
    global _LOCK
    _LOCK = threading.Lock()
    for timeline in list(_TIMELINES):
        timeline.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
