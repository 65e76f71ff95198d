"""Leases: exclusive use of a layout's bytes from acquire to release."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from workspace import argument
from workspace.block import Block, Uses, first_three
from workspace.changed import changed
from workspace.errors import CaptureError, LateUse, LeaseError, LeaseReleased
from workspace.handover import hand_over
from workspace.holding import Held, Pinnable
from workspace.refit import refit
from workspace.streams import Stream

if TYPE_CHECKING:
    from workspace.layout import Layout
    from workspace.provider import WorkspaceProvider
    from workspace.request import Request
    from workspace.timeline import Timeline
    from workspace.workspace import Workspace

_grad_enabled = torch.is_grad_enabled
_new = object.__new__
_modes = torch._C._len_torch_dispatch_stack


IDLE, ASKED, PINNED, PLAIN, FORKED, FULL = range(6)
"""States of a lease. Not held: as such; to be acquired on a named stream; released, its bytes pinned by a graph. Held:
used by its own stream and what that has joined; the same inside a fork; with everything a lease may have."""


class Lease(Pinnable):
    """Exclusive use of one layout's bytes; its tensors are attributes by the names of the layout.

    Made by `Workspace.lease` (acquired by ``with``) and `Workspace.acquire`. Contents are unspecified. Every use must
    be enqueued before the release, in host order; uses on other streams than the acquirer's are declared by a fork, or
    by `use`.

    Attributes
    ----------
    stream
        The acquirer's.
    released
        Whether it has been released (or not been acquired yet).
    """

    __slots__ = (
        "_block", "_provider", "_rest", "_state", "_t0", "_t1", "_t2", "_tensors", "_works", "asked",
        "request", "workspace",
    )  # fmt: skip

    request: Request
    workspace: Workspace
    asked: object
    _tensors: list[Any] | None
    _state: int
    _works: list[Any] | None
    _rest: int
    held: Held
    _provider: WorkspaceProvider
    _block: Block | None

    @staticmethod
    def of(request: Request, workspace: Workspace) -> Lease:
        """An idle lease of a request, which keeps its workspace alive."""
        # Not through __init__: a steady acquire would pay for the call.
        lease: Lease = _new(request.lease_type)
        lease.request = request
        lease.workspace = workspace
        lease._state = IDLE
        return lease

    # -- acquire ---------------------------------------------------------------------------------------------
    def __enter__(self) -> Lease:
        request = self.request
        timeline = request.timeline
        if timeline.busy or self._state or _modes() or _grad_enabled():
            return self._acquire()
        try:
            block = request.ready[timeline.current_key()].pop()
        except (KeyError, IndexError):  # no shelf for this stream, or nothing on it
            return self._from_another_shelf() or self._acquire()
        self._block = block
        self._t0, self._t1, self._t2 = block.first
        self._state = PLAIN
        self.stream = block.stream  # type: ignore[assignment]
        held = self.held = timeline.state.held
        held[self] = None
        return self

    def _from_another_shelf(self) -> Lease | None:
        """With a block that waits for the same request on another stream, or for its layout at larger dims."""
        request = self.request
        timeline, lender = request.timeline, request.lender
        if lender is None or not request.direct or timeline.in_progress():
            return None
        with timeline.lock:
            block, stream = None, timeline.current()
            if not timeline.busy:
                block = refit(lender, request, stream, self.workspace.provider.tensors)
                block = block or hand_over(lender, request, stream)
        if block is None:
            return None
        self._take(block)
        return self

    def on(self, stream: object) -> Lease:
        """Acquire on this stream instead of the current one (``ws.lease(..., stream=)``)."""
        self.asked = stream
        self._state = ASKED
        return self

    def _acquire(self) -> Lease:
        """The whole of it, under the lock."""
        request = self.request
        workspace = self.workspace
        if self._state not in (IDLE, ASKED):
            what = "is acquired twice" if not self.released else "is acquired again while a graph pins it"
            raise LeaseError(f"the lease of {self.owner} {what}", "call ws.lease(...) for each acquire")
        if workspace.timeline.in_progress():
            raise LeaseError(
                f"a lease of {self.owner} is acquired in the middle of another acquire of this thread",
                "acquire nothing in finalisers",
            )
        if workspace.lends_fake(self):
            return self
        timeline = workspace.timeline
        with timeline.lock:
            timeline.ready()
            workspace.check_open(request.owner)  # it may have fallen asleep while this thread waited for the lock
            stream = workspace.asked(self.asked) if self._state == ASKED else timeline.current()
            provider = workspace.provider
            if not request.nbytes:
                self._lend_nothing(stream)
                return self
            if stream.capture is not None:
                provider = stream.capture.provider(provider)
            block = provider.place(request, stream)
            self._begin(stream)
            self._provider = provider
            self._receive(block)
            if stream.capture is not None:
                stream.capture.leases.append(self)
            self.held[self] = None
        return self

    def _take(self, block: Block) -> None:
        """Hold a block that comes back to the shelf of this request and its stream."""
        self._block = block
        self._t0, self._t1, self._t2 = block.first
        self._state = PLAIN
        self.stream = block.stream  # type: ignore[assignment]
        held = self.held = self.request.timeline.state.held
        held[self] = None

    def _lend_nothing(self, stream: Stream) -> None:
        """Tensors without bytes, which are kept for the next lease where nothing is to be done at each."""
        request = self.request
        if request.ready is request.shelves and self._state == IDLE and stream.capture is None:
            self._take(request.unshelve(stream) or request.without_bytes(stream))
        else:
            call, empty = request.timeline.call, request.timeline.driver.empty
            self.lend([call(empty, one.shape, one.dtype, stream.key) for one in request.extents], stream)

    def _receive(self, block: Block | None) -> None:
        """Take in what the provider placed."""
        self._block = block
        if block is None:
            raise TypeError(f"strategy {self._provider.name} lends tensors and placed no block")
        self._show(self._view(self._provider, self.request, block))

    def _show(self, tensors: list[Any]) -> None:
        self._tensors = tensors
        self._t0, self._t1, self._t2 = first_three(tensors)

    def _hide(self) -> None:
        self._tensors = None
        self._empty_slots()

    def _empty_slots(self) -> None:
        for name in SLOTS:
            if hasattr(self, name):
                delattr(self, name)

    def _begin(self, stream: Stream) -> None:
        self.stream = stream
        self.uses = self.replays = self.events = self._works = None
        self.pins = 0
        self.held = self.request.timeline.state.held
        self._rest = ASKED if self._state == ASKED else IDLE
        self._state = FULL

    def _view(self, provider: WorkspaceProvider, request: Request, block: Block) -> list[Any]:
        try:
            tensors = block.views.get(request) or provider.tensors(request, block)
            if self.workspace.attributes or request.zero:
                self.workspace.placed(self, block)
        except BaseException:
            self._state = self._rest
            block.uses, block.events = self.stamped(request.timeline), None
            provider.give_back(block, self.stream)
            raise
        return tensors

    def lend(self, tensors: list[Any], stream: Stream) -> None:
        """Hold tensors that are nobody's bytes (fake or empty ones)."""
        self._begin(stream)
        self._provider, self._block = self.workspace.provider, None
        self._show(tensors)
        if self.stream.capture is not None:
            self.stream.capture.leases.append(self)
        self.held[self] = None

    def covers(self, address: int, tensor: Any) -> bool:
        """Whether a tensor that starts at the address lies in this lease."""
        block = self._block
        if block is None or not block.nbytes:
            return False
        # A block that was cut for larger dims has bytes that are not this lease's; one of an adaptor's has its bands.
        held = self.request.nbytes if self.request.direct else block.nbytes
        return block.address <= address < block.address + held

    @property
    def parent(self) -> WorkspaceProvider:
        return self.workspace.provider

    # -- tensors ---------------------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        # What the class lacks comes here, and what is not set: the tensors of a lease that is not held.
        if name in self.request.index:
            raise self._released(name)
        if name.startswith("_"):
            raise AttributeError(name)
        known = ", ".join(self.request.index) or "none"
        raise AttributeError(f"layout {self.request.owner!r} has no tensor {name!r}; it has: {known}")

    def _released(self, name: str) -> LeaseReleased:
        return LeaseReleased(
            f"{name!r} of the lease of {self.request.owner} is read after its release (or before the acquire)",
            "use a lease's tensors between acquire and release: inside `with ws.lease(...) as s:`",
        )

    @property
    def tensors(self) -> dict[str, Any]:
        """All tensors by name."""
        return {name: getattr(self, name) for name in self.request.index}

    def allocate(self, *names: str) -> list[Any]:
        """Tensors of these names, of all when none is given; what ops would still allocate is allocated now.

        That is, on the current stream and with unspecified contents. An eager break of a capture needs it: what it
        writes must exist before.
        """
        return [getattr(self, name) for name in names or self.request.index]

    @property
    def owner(self) -> str:
        """Name the bytes are accounted under."""
        return self.request.owner

    @property
    def released(self) -> bool:
        return self._state < PLAIN

    @property
    def nbytes(self) -> int:
        """Bytes of the layout, alignment between its tensors included."""
        return self.request.payload

    @property
    def address(self) -> int:
        """First byte of the lease's block (0 when ops allocate what they return)."""
        if self._state < PLAIN:
            self._check("address")
        if self._block is None:
            return 0
        address = self._block.address
        return address + self.request.start(address)

    # -- declared uses ---------------------------------------------------------------------------------------
    def use(self, stream: object) -> None:
        """Declare that work already or soon enqueued on `stream` uses the bytes. Raises `LateUse` after the release."""
        if self.released:
            raise LateUse(
                f"a use of {self.owner} is declared after its release", "declare it before: what follows may reuse it"
            )
        timeline = self.request.timeline
        with timeline.lock:
            target = timeline.inside(timeline.of(stream))
            captures = self.stream.capture, target.capture
            if captures[0] is not captures[1] and (captures[1] is None or self not in captures[1].kept):
                raise CaptureError(
                    f"the lease of {self.owner}, acquired on {self.stream!r}, is used on {target!r}",
                    "lease it before the capture begins, or inside it",
                )
            self.declare(target)

    def stamped(self, timeline: Timeline) -> Uses:
        """Last uses as of now; under ``strict_streams``, those of every stream seen at work."""
        if self.workspace.config.strict_streams:
            for stream in timeline.at_work(self.stream.capture):
                self.declare(stream)
        return super().stamped(timeline)

    def until(self, work: Any) -> None:
        """Release only after ``work.wait()`` on the acquiring stream (an asynchronous collective's handle)."""
        self._check("until()")
        argument.work(work)
        self._fill()
        self._works = [*(self._works or ()), work]

    def forked(self) -> bool:
        if self._state == PLAIN:
            self._state = FORKED
            return True
        return False

    def unforked(self) -> None:
        if self._state == FORKED:
            self._state = PLAIN

    def declare(self, stream: Stream) -> None:
        self._fill()
        if self._state == FULL:  # else another thread has released it meanwhile
            super().declare(stream)

    def joined(self, stream: Stream, epoch: int) -> None:
        self._fill()
        if self._state == FULL:
            super().joined(stream, epoch)

    def pin(self) -> None:
        self._fill()
        super().pin()

    def _fill(self) -> None:
        """Leave the plain state of a lease that one stream keeps to itself, which sets none of these."""
        if self._state in (PLAIN, FORKED):
            block, lent, provider = self._block, self._lent(), self.workspace.provider
            # Its release takes no lock. From here on nothing is called, so that no other thread releases it in between.
            if self._state in (PLAIN, FORKED) and self._block is block:
                self._tensors = lent
                self.uses = self.replays = self.events = self._works = None
                self.pins = 0
                self._provider = provider
                self._rest = IDLE
                self._state = FULL

    def _lent(self) -> list[Any] | None:
        return self._block.lent  # type: ignore[union-attr]

    # -- release ---------------------------------------------------------------------------------------------
    def release(self) -> None:
        """Give the bytes back; later work on any stream is ordered after the declared uses before it gets them.

        Raises `LeaseReleased` the second time.
        """
        if self.released:
            raise LeaseReleased(f"the lease of {self.owner} is released twice", "release once, or use `with`")
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state == PLAIN:
            # One stream kept it to itself. Read before anything else is enqueued, the epoch covers every use so far: a
            # thread that records on this stream closes the epoch before its record.
            block: Block = self._block  # type: ignore[assignment]
            block.epoch = block.stream.clock.epoch  # type: ignore[union-attr]
            first, second, third = block.first
            replaced = None
            try:
                if self._t0 is not first or self._t1 is not second or self._t2 is not third:
                    replaced = self._replaced(block.first)
                del self._t0, self._t1, self._t2
            except AttributeError:  # the caller has deleted one
                replaced = self._replaced(block.first)
                self._empty_slots()
            self._state = IDLE
            del self.held[self]
            try:
                if kind is not None and self._renewed(block, self.workspace.provider):
                    block.lent = block.views[self.request]
                    block.first = first_three(block.lent)
            finally:
                block.shelf.append(block)  # type: ignore[union-attr]
            if replaced is not None and kind is None:
                raise replaced
        elif self._state > PLAIN:
            lent = self._tensors if self._state == FULL else self._lent()
            replaced = self._replaced(first_three(lent or []))
            try:
                if kind is not None and self._block is not None:
                    self._renewed(self._block, self._provider)
            finally:
                self._release()
            if replaced is not None and kind is None:
                raise replaced

    def _renewed(self, block: Block, provider: WorkspaceProvider) -> bool:
        """Make the block's tensors anew where one was changed in place; whether one was.

        For a release by an error, which may be torch's refusal of an ``out=`` that is too small: the tensor is left in
        the shape of the result, over the bytes of its neighbour.
        """
        request, timeline = self.request, self.request.timeline
        tensors = block.views.get(request)
        if not tensors or timeline.in_progress() or changed(request, block, tensors) is None:
            return False
        with timeline.lock:
            block.forget_views(request)
            provider.tensors(request, block)
        return True

    def _release(self) -> None:
        """The whole of it, under the lock."""
        self._fill()
        timeline = self.request.timeline
        works, self._works = self._works, None
        if timeline.in_progress():
            # A finaliser (a dropped generator's, say) in the middle of this thread's own acquire: what that is doing to
            # the pool must not change under it.
            uses = self._ended()
            self._state = PINNED
            timeline.later(lambda: self._settle(uses, works))
            return
        if works is not None:
            self._refuse_waiting(works)
            self.workspace.await_works(self, works)
        with timeline.lock:
            self._settle(self._ended(), None)

    def _captured_since(self) -> bool:
        """Whether a stream that it was acquired on outside any capture captures now: a wait there would break that."""
        timeline, stream = self.request.timeline, self.stream
        return stream.capture is None and bool(timeline.call(timeline.driver.capture_of, stream.key))

    def _refuse_waiting(self, works: list[Any]) -> None:
        """Stay held where the collectives cannot be waited for."""
        try:
            captured = self._captured_since()
        except BaseException:
            self._works = works
            raise
        if captured:
            self._works = works
            raise CaptureError(
                f"the lease of {self.owner} is released while {self.stream!r}, on which a collective is to be waited "
                "for, captures",
                "release it before the capture, or after it",
            )

    def _ended(self) -> Uses:
        """Be held no longer; returns the last uses."""
        uses = self.stamped(self.request.timeline)
        self._hide()
        del self.held[self]
        if self.stream.capture is not None:
            self.stream.capture.leases.remove(self)
        self.uses = None
        return uses

    def _settle(self, uses: Uses, works: list[Any] | None) -> None:
        failed = self._settle_works(uses, works) if works is not None else None
        capture = self.stream.capture
        self._state = PINNED if self.pins else self._rest
        if self.pins:
            self.replayed(uses, self.request.timeline)
        elif capture is not None and not capture.open:
            self._end_with_capture()
        else:
            self._give_back(self.last_uses(uses))
        if failed is not None:
            raise failed

    def _end_with_capture(self) -> None:
        """The capture it was taken in has ended since its release: bytes are the graph's, its streams are forgotten."""
        if self._block is not None:
            self._provider.abandon(self._block)
        else:
            self._give_back({})

    def _settle_works(self, uses: Uses, works: list[Any]) -> BaseException | None:
        """Wait for the collectives of a lease that a finaliser has released; what cannot be waited for pins it."""
        timeline, capture = self.request.timeline, self.stream.capture
        self._works = works
        try:
            if self._captured_since():
                self.pin()
                timeline.deferred.append(self._wait_late)  # a wait now would break the capture
            else:
                self.workspace.await_works(self, works)
                self._works = None
                uses[self.stream.id] = self.stream.clock.epoch  # that of the wait, and not of the release before
        except BaseException as error:
            if capture is None:
                self.pin()
                timeline.unwaited.append(self)
            elif capture.open:
                self.pin()  # for as long as the graph has the bytes
            return error
        return None

    def _wait_late(self) -> None:
        """Wait for them after all: after the capture that forbade it, or again."""
        timeline = self.request.timeline
        try:
            if self._captured_since():
                timeline.unwaited.append(self)  # by a capture that the library was not told of
                return
            self.workspace.await_works(self, self._works or [])
            self._works = None
            self.replayed({self.stream.id: self.stream.clock.epoch}, timeline)
        except BaseException:
            timeline.unwaited.append(self)
            raise
        self._waited()

    def _wait_again(self) -> None:
        """Try what has failed, and was said to, once more."""
        with suppress(Exception):
            self._wait_late()

    def _waited(self) -> None:
        """Its collectives are over."""
        self._works = None
        self.unpin()

    def _give_back(self, uses: Uses) -> None:
        block = self._block
        if block is None:
            return
        if not block.nbytes:
            block.shelf.append(block)  # type: ignore[union-attr]  # no provider's
            return
        block.uses, block.events = uses, self.events
        self.events = None
        self._provider.give_back(block, self.stream)

    def let_go(self) -> None:
        if self.released:
            try:
                self._give_back(self.last_uses({}))
            finally:
                self._state = self._rest

    def outlived_capture(self) -> None:
        """The capture it was taken in has ended: its bytes are the graph's, and there is nothing left to release."""
        self._abandon()
        self._hide()
        self.uses = None
        self._state = self._rest
        self.held.pop(self, None)

    def _abandon(self) -> None:
        if self._block is not None:
            self._provider.abandon(self._block)

    def _check(self, what: str) -> None:
        if self.released:
            raise LeaseReleased(f"{what} of the lease of {self.owner} after its release", "use it before")

    def _refuse_replacing(self, name: str, present: Any, tensor: Any) -> None:
        # ``lease.x += 1`` assigns what the in-place operator returned: the list is the block's.
        if tensor is not present:
            raise self._no_replacing(name)

    def _no_replacing(self, name: str) -> LeaseError:
        return LeaseError(
            f"{name!r} of the lease of {self.owner} cannot be replaced or deleted", "copy into it: .copy_(...)"
        )

    def _replaced(self, lent: tuple[Any, ...]) -> LeaseError | None:
        """An error where one of the first tensors is not the one that was lent: a slot cannot refuse an assignment."""
        present = getattr(self, "_t0", None), getattr(self, "_t1", None), getattr(self, "_t2", None)
        for name, one, other in zip(self.request.index, present, lent, strict=False):
            if one is not other:
                return self._no_replacing(name)
        return None

    # -- what a lease is not -----------------------------------------------------------------------------------
    def __reduce__(self) -> Any:
        raise LeaseError("a lease cannot be pickled or copied: its bytes are this process's", "copy its tensors")


SLOTS = ("_t0", "_t1", "_t2")
"""Where a lease keeps its first tensors: a slot is read without a call, a property is not."""


Attribute = Callable[[str, int], Any]

_TYPES: dict[type[Lease], weakref.WeakKeyDictionary[Layout, type[Lease]]] = {}


def lease_type(layout: Layout, base: type[Lease] = Lease) -> type[Lease]:
    """The lease of a layout, with the names of its tensors."""
    return named_type(base, layout, _tensor)


def named_type(base: type[Lease], layout: Layout, attribute: Attribute) -> type[Lease]:
    """A class of leases of one layout, made once; `attribute` makes the tensor of a name and position readable."""
    known = _TYPES.setdefault(base, weakref.WeakKeyDictionary())
    found = known.get(layout)
    if found is None:
        names: dict[str, Any] = {name: attribute(name, position) for position, name in enumerate(layout.specs)}
        names["__slots__"] = ()
        found = known[layout] = type(base.__name__, (base,), names)
    return found


def _tensor(name: str, position: int) -> Any:
    if position < len(SLOTS):
        return Lease.__dict__[SLOTS[position]]

    def get(self: Lease) -> Any:
        if self._state < PLAIN:
            raise self._released(name)
        return (self._tensors if self._state == FULL else self._block.lent)[position]  # type: ignore[index,union-attr]

    def put(self: Lease, tensor: Any) -> None:
        self._refuse_replacing(name, get(self), tensor)

    def drop(self: Lease) -> None:
        raise self._no_replacing(name)

    return property(get, put, drop, doc=f"Tensor {name!r} of the layout.")
