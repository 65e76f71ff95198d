"""Leases under strategies that let ops allocate what they return: tensors that come into being one by one."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from workspace.block import Block, Uses
from workspace.lease import FULL, IDLE, PLAIN, Lease, named_type
from workspace.provider import Homes
from workspace.slot import Slot
from workspace.streams import Event, Stream

if TYPE_CHECKING:
    from workspace.layout import Layout

_grad_enabled = torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack


class LazyLease(Lease):
    """A lease whose tensors are slots until an op fills them, or their first use allocates them."""

    __slots__ = ("_earlier", "_homes", "_made")

    _homes: Homes
    _made: dict[int, tuple[Stream, int, Event | None]] | None
    """By position, what was allocated where other streams may come to use it: on which stream, at which epoch."""
    _earlier: list[Homes]
    """What positions held before, where a graph may use it at each replay, or a collective does that is waited for at
    the release."""

    # -- acquire ---------------------------------------------------------------------------------------------
    def __enter__(self) -> Lease:
        request, workspace = self.request, self.workspace
        timeline = request.timeline
        if (
            timeline.busy or self._state or not request.direct or workspace.closed or timeline.in_progress()
            or _modes() or _grad_enabled()
        ):  # fmt: skip
            return self._acquire()
        with timeline.lock:
            stream = self.stream = timeline.current()
            self._provider = workspace.provider
            self._provider.place(request, stream)
        self._receive(None)
        self._state = PLAIN
        held = self.held = timeline.state.held
        held[self] = None
        return self

    def _receive(self, block: Block | None) -> None:
        self._block = self._made = None
        self._homes = {}
        self._tensors = [None] * len(self.request.extents)
        if self.request.zero:
            # At once, and where it is acquired: made by one branch they would be zeros to no other.
            try:
                self._make(list(range(len(self._tensors))), self.stream)
            except BaseException:
                self._state = self._rest
                self._give_back(self.stamped(self.request.timeline))
                raise

    def _show(self, tensors: list[Any]) -> None:
        self._made = None
        self._homes = {}
        self._tensors = tensors

    def _hide(self) -> None:
        self._tensors = None

    def _lent(self) -> list[Any] | None:
        return self._tensors

    def covers(self, address: int, tensor: Any) -> bool:
        return any(tensor is one or _starts(one) == address for homes in self._kept() for one, _ in homes.values())

    def _kept(self) -> list[Homes]:
        """The tensors by position, and those that the positions held before and are used still."""
        return [self._homes, *getattr(self, "_earlier", ())]

    # -- tensors ---------------------------------------------------------------------------------------------
    def allocate(self, *names: str) -> list[Any]:
        if self._state < PLAIN:
            self._check("allocate()")
        request, tensors = self.request, self._tensors
        assert tensors is not None
        try:
            positions = request.positions(names)
        except KeyError as unknown:
            return [self.__getattr__(unknown.args[0])]
        timeline = request.timeline
        with timeline.lock:
            stream = timeline.current()
            self._make([position for position in positions if tensors[position] is None], stream)
            for position in positions:
                self._follow(position, stream)
        found = [tensors[position] for position in positions]
        return [one.tensor() if type(one) is Slot else one for one in found]

    def slot(self, position: int) -> Slot:
        """A new slot for a position that has neither slot nor tensor."""
        made = self._tensors[position] = Slot(self, position, self.request.extents[position])  # type: ignore[index]
        return made

    def fresh(self, position: int) -> Any:
        """Allocate one tensor on the current stream (`Slot.tensor`)."""
        timeline = self.request.timeline
        with timeline.lock:
            self._make([position], timeline.current())
        return self._tensors[position]  # type: ignore[index]

    def _used(self, position: int) -> None:
        """The tensor of a position is about to be used on the current stream."""
        if self._made and self._state > PLAIN:
            timeline = self.request.timeline
            with timeline.lock:
                self._follow(position, timeline.current())

    def _follow(self, position: int, stream: Stream) -> None:
        """Make a stream's next work come after what the allocator's bytes were used for before they were allocated.

        They are free for the stream they were allocated on. A branch that was forked earlier is not ordered after what
        that stream has done with them since.
        """
        made = self._made.get(position) if self._made and self._state > PLAIN else None
        if made is not None and made[0] is not stream and made[0].capture is stream.capture:
            self.request.timeline.follow(*made, stream)

    def filled(self, position: int, tensor: Any) -> None:
        """An op's returning form made the tensor, on the current stream."""
        timeline = self.request.timeline
        with timeline.lock:
            before = self._homes.get(position)
            if before is None or before[0] is not tensor:
                if before is not None:
                    self._replace(position)
                self._provider.received(self.request, self.request.extents[position].nbytes)
                if self._made:
                    self._made.pop(position, None)  # whoever uses what an op made comes after the op
            self._keep(position, tensor, timeline.current())

    def _replace(self, position: int) -> None:
        """Give back what a position held: a branch may read it still. What reads the position later reads the new."""
        timeline, before = self.request.timeline, self._homes.pop(position)
        if self._state == FULL and (self.pins or self._works):
            self._earlier = [*self._kept()[1:], {position: before}]
            return
        if self._state == PLAIN:
            uses = {self.stream.id: self.stream.clock.epoch}
        else:
            self._fill()
            uses = self.stamped(timeline)
        self._provider.returned(self.request, {position: before}, uses)

    def _make(self, positions: list[int], stream: Stream) -> None:
        request, fresh = self.request, self._provider.fresh
        made = 0
        try:
            for position in positions:
                tensor = fresh(request, position, stream)
                nbytes = request.extents[position].nbytes
                if request.zero:
                    driver = request.timeline.driver
                    request.timeline.call(driver.memset, driver.address_of(tensor), nbytes, 0, stream.key)
                self._note(position, stream)
                self._keep(position, tensor, stream)
                made += nbytes
        finally:
            self._provider.received(request, made)

    def _note(self, position: int, stream: Stream) -> None:
        """Remember where a tensor was allocated, if others than the acquirer may use it."""
        if self._state == PLAIN and stream is not self.stream:
            self._fill()  # a use that is to be declared yet
        if self._state > PLAIN:
            timeline = self.request.timeline
            epoch = stream.clock.epoch
            event = (timeline.exact_events({stream.id: epoch}) or {}).get(stream.id)
            if self._made is None:
                self._made = {}
            self._made[position] = stream, epoch, event

    def _keep(self, position: int, tensor: Any, stream: Stream) -> None:
        self._tensors[position] = tensor  # type: ignore[index]
        if stream.capture is not None and self.stream.capture is None:
            # A lease of before the capture, filled inside: the tensor is the graph's as well.
            stream.capture.memory.append(tensor)
            stream = self.request.timeline.outside(stream)
        self._homes[position] = tensor, stream

    # -- release ---------------------------------------------------------------------------------------------
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeline = self.request.timeline
        if self._state == PLAIN and not timeline.in_progress():
            with timeline.lock:
                self._state = IDLE
                self._tensors = None
                del self.held[self]
                homes, self._homes = self._homes, {}
                if homes:
                    uses = {self.stream.id: self.stream.clock.epoch}
                    self._provider.returned(self.request, homes, uses)
        elif self._state >= PLAIN:
            self._release()

    def _give_back(self, uses: Uses) -> None:
        everything, self._homes, self._earlier = self._kept(), {}, []
        failed: BaseException | None = None
        for homes in everything:
            try:
                if homes:
                    self._provider.returned(self.request, homes, uses)
            except BaseException as error:  # the others go back all the same
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                failed = (
                    None  # its traceback names this frame, and the frame it: the tensors would wait for the collector
                )

    def _abandon(self) -> None:
        self._give_back(self.stamped(self.request.timeline))


def lazy_type(layout: Layout, base: type[LazyLease] = LazyLease) -> type[Lease]:
    """The lazy lease of a layout, with the names of its tensors."""
    return named_type(base, layout, _tensor)


def _tensor(name: str, position: int) -> Any:
    def get(self: LazyLease) -> Any:
        if self._state < PLAIN:
            raise self._released(name)
        found = self._tensors[position]  # type: ignore[index]
        if found is None:
            return self.slot(position)
        if self._made and type(found) is not Slot:
            self._used(position)
        return found

    def put(self: LazyLease, tensor: Any) -> None:
        self._refuse_replacing(name, get(self), tensor)

    def drop(self: LazyLease) -> None:
        raise self._no_replacing(name)

    return property(get, put, drop, doc=f"Tensor {name!r} of the layout.")


def _starts(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else tensor.address
