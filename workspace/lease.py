"""Leases: exclusive use of a layout's bytes from acquire to release."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from workspace.block import Block, Uses
from workspace.errors import CaptureError, LateUse, LeaseError, LeaseReleased
from workspace.holding import Pinnable
from workspace.slot import Slot
from workspace.streams import CURRENT, Stream

if TYPE_CHECKING:
    from workspace.layout import Layout
    from workspace.provider import WorkspaceProvider
    from workspace.request import Request
    from workspace.timeline import Timeline

_grad_enabled = torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack


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

    # Class attributes are what most leases never change.
    asked: object = CURRENT
    _tensors: list[Any] | None = None
    _works: list[Any] | None = None
    _homes: dict[int, tuple[Any, Stream]]
    _provider: WorkspaceProvider
    _block: Block | None

    def __init__(self, request: Request) -> None:
        self.request = request

    # -- acquire ---------------------------------------------------------------------------------------------
    def __enter__(self) -> Lease:
        request = self.request
        timeline = request.timeline
        if timeline.busy or _modes() or _grad_enabled() or self.asked is not CURRENT or self.pins:
            return self._acquire()
        shelf = request.ready.get(timeline.current_key())
        if not shelf or self._tensors is not None:
            return self._acquire()
        try:
            block = shelf.pop()
        except IndexError:
            return self._acquire()
        self._block = block
        self._tensors = block.lent
        self.stream = block.stream  # type: ignore[assignment]
        held = self._held = timeline.state.held
        held.append(self)
        return self

    def _acquire(self) -> Lease:
        """The whole of it, under the lock."""
        request = self.request
        workspace = request.workspace
        if self._tensors is not None or self.pins:
            what = "is acquired twice" if self._tensors is not None else "is acquired again while a graph pins it"
            raise LeaseError(f"the lease of {self.owner} {what}", "call ws.lease(...) for each acquire")
        if workspace.lends_fake(self):
            return self
        timeline = workspace.timeline
        with timeline.lock:
            timeline.ready()
            stream = timeline.current() if self.asked is CURRENT else workspace.asked(self.asked)
            provider = workspace.provider
            if not request.nbytes:
                self.lend([timeline.driver.empty(one.shape, one.dtype, stream.key) for one in request.extents])
                return self
            if stream.capture is not None:
                provider = stream.capture.provider(provider)
            block = provider.place(request, stream)
            self.stream = stream
            self.uses = None
            self._provider = provider
            self._block = block
            if block is None:
                self._homes = {}
                self._tensors = [Slot(self, position, one) for position, one in enumerate(request.extents)]
            else:
                self._tensors = block.views.get(request) or self._view(provider, request, block)
                if workspace.attributes or request.zero:
                    workspace.placed(self, block)
            if stream.capture is not None:
                stream.capture.leases.append(self)
            held = self._held = timeline.state.held
            held.append(self)
        return self

    def _view(self, provider: WorkspaceProvider, request: Request, block: Block) -> list[Any]:
        try:
            return provider.tensors(request, block)
        except BaseException:
            block.uses = self.stamped(self.request.workspace.timeline)
            provider.give_back(block, self.stream)
            raise

    def lend(self, tensors: list[Any]) -> None:
        """Hold tensors that are nobody's bytes (fake or empty ones)."""
        timeline = self.request.workspace.timeline
        self.stream = timeline.current()
        self.uses = None
        self._provider, self._block, self._homes = self.request.workspace.provider, None, {}
        self._tensors = tensors
        if self.stream.capture is not None:
            self.stream.capture.leases.append(self)
        self._held = timeline.state.held
        self._held.append(self)

    def covers(self, address: int, tensor: Any) -> bool:
        """Whether a tensor that starts at the address lies in this lease."""
        if self._block is None:
            return any(tensor is one or _starts(one) == address for one, _ in self._homes.values())
        return self._block.address <= address < self._block.address + max(self._block.nbytes, 1)

    # -- tensors ---------------------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        # Only names the class lacks come here: the layout's tensors are properties of `lease_type`.
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(self.request.index) or "none"
        raise AttributeError(f"layout {self.request.owner!r} has no tensor {name!r}; it has: {known}")

    def _released(self, name: str) -> LeaseReleased:
        return LeaseReleased(
            f"{name!r} of the lease of {self.request.owner} is read after its release (or before the acquire)",
            "use a lease's tensors between acquire and release",
        )

    @property
    def tensors(self) -> dict[str, Any]:
        """All tensors by name."""
        return {name: getattr(self, name) for name in self.request.index}

    @property
    def owner(self) -> str:
        """Name the bytes are accounted under."""
        return self.request.owner

    @property
    def released(self) -> bool:
        return self._tensors is None

    @property
    def nbytes(self) -> int:
        """Bytes of the layout, alignment between its tensors included."""
        return self.request.payload

    @property
    def address(self) -> int:
        """First byte of the lease's block (0 when ops allocate what they return)."""
        self._check("address")
        return self._block.address + self.request.start(self._block.address) if self._block else 0

    # -- declared uses ---------------------------------------------------------------------------------------
    def use(self, stream: object) -> None:
        """Declare that work already or soon enqueued on `stream` uses the bytes. Raises `LateUse` after the release."""
        if self._tensors is None:
            raise LateUse(
                f"a use of {self.owner} is declared after its release", "declare it before: what follows may reuse it"
            )
        timeline = self.request.workspace.timeline
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
        if self.request.workspace.config.strict_streams:
            for stream in timeline.streams():
                self.declare(stream)
        return super().stamped(timeline)

    def until(self, work: Any) -> None:
        """Release only after ``work.wait()`` on the acquiring stream (an asynchronous collective's handle)."""
        self._check("until()")
        self._works = [*(self._works or ()), work]

    # -- release ---------------------------------------------------------------------------------------------
    def release(self) -> None:
        """Give the bytes back; later work on any stream is ordered after the declared uses before it gets them.

        Raises `LeaseReleased` the second time.
        """
        if self._tensors is None:
            raise LeaseReleased(f"the lease of {self.owner} is released twice", "release once, or use `with`")
        if self._works is not None:
            works, self._works = self._works, None
            self.request.workspace.await_works(self, works)
        timeline = self.request.workspace.timeline
        with timeline.lock:
            self._tensors = None
            held = self._held
            if held and held[-1] is self:
                del held[-1]
            else:
                held.remove(self)
            stream = self.stream
            if stream.capture is not None:
                stream.capture.leases.remove(self)
            if self.uses is None:
                uses = {stream.id: timeline.clocks.epoch[stream.id]}
            else:
                uses = self.stamped(timeline)
                self.uses = None
            if self.pins:
                self.replayed(uses, timeline)
            else:
                self._give_back(uses)

    def _give_back(self, uses: Uses) -> None:
        block = self._block
        if block is None:
            for position, (tensor, home) in self._homes.items():
                self._provider.returned(self.request, position, tensor, home, uses)
            self._homes = {}
        else:
            block.uses, block.events = uses, self.events
            self._provider.give_back(block, self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tensors is None:
            return
        block = self._block
        if (
            self.uses is None
            and block is not None
            and block.lent is self._tensors
            and not self.pins
            and self._works is None
            and self._held[-1] is self
        ):
            # One stream kept it to itself. Read before anything else is enqueued, the epoch covers every use so far: a
            # thread that records on this stream closes the epoch before its record.
            block.epoch = self.request.epochs[self.stream.id]
            self._tensors = None
            del self._held[-1]
            block.shelf.append(block)  # type: ignore[union-attr]
        else:
            self.release()

    def let_go(self) -> None:
        if self._tensors is None:
            uses, self.replays = self.replays or {}, None
            self._give_back(uses)
            self.events = None

    def outlived_capture(self) -> None:
        """The capture it was taken in has ended: its bytes are the graph's, and nothing is left to release."""
        self._tensors = None
        if self in self._held:
            self._held.remove(self)

    # -- tensors from the framework's allocator ----------------------------------------------------------------
    def fresh(self, position: int) -> Any:
        """Allocate one tensor on the current stream (`Slot.tensor`)."""
        timeline = self.request.workspace.timeline
        with timeline.lock:
            stream = timeline.current()
            tensor = self._provider.fresh(self.request, position, stream)
            if self.request.zero:
                extent = self.request.extents[position]
                timeline.driver.memset(timeline.driver.address_of(tensor), extent.nbytes, 0, stream.key)
            self._keep(position, tensor, stream)
        return tensor

    def filled(self, position: int, tensor: Any) -> None:
        """An op's returning form made the tensor, on the current stream."""
        timeline = self.request.workspace.timeline
        with timeline.lock:
            self._keep(position, tensor, timeline.current())

    def _keep(self, position: int, tensor: Any, stream: Stream) -> None:
        assert self._tensors is not None
        self._tensors[position] = tensor
        if position not in self._homes:
            self._provider.received(self.request, position)
        self._homes[position] = (tensor, stream)

    def _check(self, what: str) -> None:
        if self._tensors is None:
            raise LeaseReleased(f"{what} of the lease of {self.owner} after its release", "use it before")

    # -- what a lease is not -----------------------------------------------------------------------------------
    def __reduce__(self) -> Any:
        raise LeaseError("a lease cannot be pickled or copied: its bytes are this process's", "copy its tensors")


_TYPES: weakref.WeakKeyDictionary[Layout, type[Lease]] = weakref.WeakKeyDictionary()


def lease_type(layout: Layout) -> type[Lease]:
    """The lease of a layout: its tensors are properties, which read several times faster than ``__getattr__``."""
    found = _TYPES.get(layout)
    if found is None:
        names = {name: _tensor(name, position) for position, name in enumerate(layout.specs)}
        found = _TYPES[layout] = type("Lease", (Lease,), names)
    return found


def _tensor(name: str, position: int) -> property:
    def get(self: Lease) -> Any:
        try:
            return self._tensors[position]  # type: ignore[index]
        except TypeError:
            raise self._released(name) from None

    return property(get, doc=f"Tensor {name!r} of the layout.")


def _starts(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else tensor.address
