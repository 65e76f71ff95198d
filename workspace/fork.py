"""Forks: branches on other streams, joined on exit whatever happens, that feed the clocks and declare the uses."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from workspace.errors import CaptureError, ForkError, StreamError, WorkspaceError
from workspace.holding import Held, Holding
from workspace.process import OfProcess
from workspace.streams import Stream

if TYPE_CHECKING:
    from workspace.capture import Capture
    from workspace.timeline import Timeline


class Fork(OfProcess):
    """A fork of the caller's current stream to others; a context manager made by `Workspace.fork`.

    Entering makes every branch stream wait for the parent, and declares the branches for each lease the thread holds.
    Leaving makes the parent wait for every branch, also when one raised, and stamps the branches' uses there; leases
    acquired in a branch, by whatever thread, and still held get the parent declared. ``branch(stream)`` is called in
    the thread, and the micro-batch, that leases inside.

    Examples
    --------
    >>> with ws.fork(aux0, aux1) as branch:     # doctest: +SKIP
    ...     with branch(aux0):
    ...         indexer(scratch.q8)
    """

    __slots__ = ("_branches", "_elsewhere", "_flagged", "_foreign", "_held", "_parent", "_timeline")

    def __init__(self, timeline: Timeline, streams: tuple[Stream, ...]) -> None:
        self._timeline = timeline
        self._branches = streams
        self._parent: Stream | None = None

    def __enter__(self) -> Fork:
        timeline = self._timeline
        if self._parent is not None:
            raise ForkError("a fork is entered twice", "call ws.fork(...) for each")
        with timeline.lock:
            if timeline.refusal is not None:
                raise timeline.refusal
            parent = timeline.current()
            branches = self._branches
            for stream in branches:
                if stream.key == parent.key:
                    raise ForkError(f"{parent!r} is forked to itself", "fork to other streams than the current one")
            if parent.capture is not None:
                self._refuse_merging(parent, parent.capture)
                branches = self._branches = timeline.into_capture(branches, parent.capture)
                parent.capture.keep_held()
            elif timeline.captures:
                self._refuse_capturing(parent)
            event = timeline.record(parent)
            for stream in branches:
                timeline.wait(event, stream)
            self._parent = parent
        self._enclose(timeline.state.held, parent)
        return self

    def _enclose(self, held: Held, parent: Stream) -> None:
        """Stand behind the leases that the branches may use, among what the thread holds."""
        self._held = held
        self._elsewhere: list[Held] | None = None  # what other threads and micro-batches hold that branches run in
        self._flagged: list[Holding] = []
        self._foreign: list[Holding] = []
        for one in tuple(held):
            if isinstance(one, Holding):
                if one.forked():
                    self._flagged.append(one)
                # The acquirer's own join puts a use before whatever the acquirer does next; another's must be told.
                if one.stream is not parent:
                    self._foreign.append(one)
        held[self] = None

    def _refuse_capturing(self, parent: Stream) -> None:
        """Waiting for an eager parent would break the capture a branch is part of."""
        for stream in self._branches:
            if self._timeline.call(self._timeline.driver.capture_of, stream.key):
                raise CaptureError(
                    f"{parent!r}, which does not capture, is forked to {stream!r}, which does",
                    "fork inside the capture, or to streams that are not part of it",
                )

    def _refuse_merging(self, parent: Stream, capture: Capture) -> None:
        """Waiting for a stream of one capture would break the other, and that one with it."""
        for stream in self._branches:
            identity = self._timeline.call(self._timeline.driver.capture_of, stream.key)
            if identity and self._timeline.captures.get(identity) is not capture:
                raise CaptureError(
                    f"{parent!r} is forked to {stream!r}, which is part of another capture",
                    "fork to streams that do not capture, or capture both on streams of one",
                )

    def branches_of(self, lease: Holding) -> tuple[Stream, ...]:
        """Branches that are streams of the lease's side of a capture and not its own."""
        capture = lease.stream.capture
        return tuple(one for one in self._branches if one is not lease.stream and one.capture is capture)

    def __call__(self, stream: Any) -> Branch:
        """The branch on one of the fork's streams: work inside its ``with`` goes there."""
        if self._parent is None:
            raise ForkError("a branch is entered outside its fork", "use it inside `with ws.fork(...) as branch`")
        self._visit(self._timeline.state.held)
        if stream not in self._branches:
            # In a capture the branches are the streams' selves there, which the caller does not know.
            asked = self._timeline.of(stream)
            if all(one.key != asked.key for one in self._branches):
                raise ForkError(f"{asked!r} is not one of the fork's streams", "name it in ws.fork(...)")
            return Branch(self._timeline, asked.key)
        return Branch(self._timeline, stream.key)

    def _visit(self, held: Held) -> None:
        """A branch of another thread or micro-batch: what is acquired there from now on is acquired inside.

        Inside of the forks around this one, too.
        """
        if held is self._held:
            return
        with self._timeline.lock:
            if self._parent is None:
                raise ForkError("a branch is entered while its fork is left", "leave the fork after its branches")
            if self not in held:
                for outer in self._held.open_forks():
                    if outer is self:
                        break
                    outer._visit(held)
                held[self] = None
                self._elsewhere = [*(self._elsewhere or ()), held]

    def has(self, stream: Stream) -> bool:
        """Whether the stream is one of its branches."""
        return stream in self._branches

    def _everywhere(self) -> list[Held]:
        return [self._held, *(self._elsewhere or ())]

    def _inside(self) -> list[Holding]:
        return [lease for held in self._everywhere() for lease in held.acquired_inside(self)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeline, parent = self._timeline, self._parent
        self._parent = None
        if parent is None:
            return
        if parent.capture is not None and not parent.capture.open:
            self._outlived_capture(parent.capture, error)
            return
        inside, unjoined = self._inside(), list(self._branches)
        try:
            with timeline.lock:
                inside = self._inside()  # now that nobody is in the middle of `_visit`
                foreign = self._still_held(inside) if self._foreign else ()
                for stream in self._branches:
                    try:
                        self._join(stream, parent, foreign)
                        unjoined.remove(stream)
                    except WorkspaceError as failed:
                        # The other branches are joined all the same, and the error of the body is the one that arrives.
                        if error is None:
                            error = failed
                        else:
                            error.add_note(f"joining {stream!r} failed too: {failed}")
        finally:
            self._leave(unjoined, inside, parent)
        if kind is None and error is not None:
            raise error

    def _leave(self, unjoined: list[Stream], inside: list[Holding], parent: Stream) -> None:
        """End the fork, whatever has become of its joins.

        Until now it was among what the thread holds, so that a release anywhere counted its branches. A branch that was
        not joined stays declared: the release of a lease around the fork stamps it, and the next acquire waits for it.
        """
        try:
            with self._timeline.lock:
                if unjoined:
                    for lease in self._held.holdings():
                        if lease not in inside:
                            for stream in unjoined:
                                lease.declare(stream)
                # Leases acquired inside and still held may be used by the parent from now on.
                for lease in inside:
                    if lease.stream is not parent:
                        lease.declare(parent)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Be among what nobody holds, and nobody is inside of."""
        with self._timeline.lock:
            for held in self._everywhere():
                held.pop(self, None)
        for lease in self._flagged:
            lease.unforked()

    def _outlived_capture(self, capture: Capture, error: BaseException | None) -> None:
        """The capture it was entered in has ended, and with it the streams' selves there: nothing is left to join.

        Raises `CaptureError`, or adds it to the error of the body.
        """
        self._forget()
        late = CaptureError(
            f"a fork inside {capture.name} is left after the capture has ended",
            "end the capture after the forks inside it: `with ws.capture(): with ws.fork(...)`",
        )
        if error is None:
            raise late
        error.add_note(str(late))

    def _still_held(self, inside: list[Holding]) -> list[Holding]:
        """Leases of other streams than the parent that were held when the fork began and have not been let go since."""
        return [lease for lease in self._foreign if lease in self._held and lease not in inside]

    def _join(self, stream: Stream, parent: Stream, foreign: list[Holding] | tuple[()]) -> None:
        timeline = self._timeline
        for one in (stream, parent):
            self._refuse_taken(one)
        epoch = stream.clock.epoch
        timeline.wait(timeline.record(stream), parent)
        for lease in foreign:
            # A join by a branch that is itself to be joined goes with that branch: nothing to remember.
            if not self._encloses(parent, lease):
                lease.joined(stream, epoch)

    def _refuse_taken(self, stream: Stream) -> None:
        """Another thread has made a stream part of its capture since: a wait across its border would break that."""
        timeline = self._timeline
        if stream.capture is None and (timeline.captures or timeline.query_captures):
            if timeline.call(timeline.driver.capture_of, stream.key):
                raise CaptureError(
                    f"{stream!r} has become part of a capture inside a fork that began before it",
                    "leave the fork before another thread captures its streams",
                )

    def _encloses(self, parent: Stream, lease: Holding) -> bool:
        return any(parent in fork.branches_of(lease) for fork in self._held.forks_around(lease))


class Branch(OfProcess):
    """Makes a stream current for a ``with`` block."""

    __slots__ = ("_before", "_driver", "_key")

    def __init__(self, timeline: Timeline, key: int) -> None:
        self._driver = timeline.driver
        self._key = key
        self._before: tuple[int, Any] | None = None  # the stream that was current, and so on outwards

    def __enter__(self) -> None:
        driver = self._driver
        self._before = driver.current_stream(), self._before
        driver.set_stream(self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            raise StreamError("a stream is left that was not entered", "use it in a `with` statement")
        key, self._before = self._before
        self._driver.set_stream(key)
