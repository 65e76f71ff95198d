"""Leases under strategies that let ops allocate what they return: tensors that come into being one by one."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from workspace.block import Block, Uses
from workspace.lease import IDLE, PLAIN, Lease, named_type
from workspace.provider import Homes
from workspace.slot import Slot
from workspace.streams import Stream

if TYPE_CHECKING:
    from workspace.layout import Layout

_grad_enabled = torch.is_grad_enabled
_modes = torch._C._len_torch_dispatch_stack


class LazyLease(Lease):
    """A lease whose tensors are slots until an op fills them, or their first use allocates them."""

    __slots__ = ("_homes",)

    _homes: Homes

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
        self._block = None
        self._homes = {}
        self._tensors = [None] * len(self.request.extents)

    def _show(self, tensors: list[Any]) -> None:
        self._homes = {}
        self._tensors = tensors

    def _hide(self) -> None:
        self._tensors = None

    def _lent(self) -> list[Any] | None:
        return self._tensors

    def covers(self, address: int, tensor: Any) -> bool:
        return any(tensor is one or _starts(one) == address for one, _ in self._homes.values())

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
            self._make([position for position in positions if tensors[position] is None], timeline.current())
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

    def filled(self, position: int, tensor: Any) -> None:
        """An op's returning form made the tensor, on the current stream."""
        timeline = self.request.timeline
        with timeline.lock:
            before = self._homes.get(position)
            if before is None or before[0] is not tensor:
                if before is not None:
                    self._replace(position)
                self._provider.received(self.request, self.request.extents[position].nbytes)
            self._keep(position, tensor, timeline.current())

    def _replace(self, position: int) -> None:
        """Give back what a position held: a branch may read it still. What reads the position later reads the new."""
        timeline, before = self.request.timeline, self._homes.pop(position)
        if self._state == PLAIN:
            uses = {self.stream.id: timeline.clocks.epoch[self.stream.id]}
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
                self._keep(position, tensor, stream)
                made += nbytes
        finally:
            self._provider.received(request, made)

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
                self._give_back({self.stream.id: timeline.clocks.epoch[self.stream.id]})
        elif self._state >= PLAIN:
            self._release()

    def _give_back(self, uses: Uses) -> None:
        homes, self._homes = self._homes, {}
        if homes:
            self._provider.returned(self.request, homes, uses)

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
        return self.slot(position) if found is None else found

    def put(self: LazyLease, tensor: Any) -> None:
        self._refuse_replacing(name, get(self), tensor)

    return property(get, put, doc=f"Tensor {name!r} of the layout.")


def _starts(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, torch.Tensor) else tensor.address
