"""Poison: what a lease hands out and what it leaves behind are patterns that no computation mistakes for data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workspace.adaptors.adaptor import Adaptor
from workspace.block import Block
from workspace.provider import WorkspaceProvider
from workspace.request import Request
from workspace.streams import Stream
from workspace.timeline import Timeline

if TYPE_CHECKING:
    from workspace.capture import Capture

INTEGER, FLOAT = 0xCB, 0xFF
"""Fill bytes: a conspicuous integer, and all ones, which is NaN in every floating dtype that has one."""


class Poison(Adaptor):
    """Fills a lease at acquire (floats NaN, the rest 0xCB) and its block at release (0xCB).

    The release fill goes to the acquirer's stream (in a capture to the branch that runs, or the stream it began on),
    after every declared use: a use that was not declared then reads, or is overwritten by, the pattern.
    """

    def __init__(self, inner: WorkspaceProvider, timeline: Timeline) -> None:
        super().__init__(inner)
        self.timeline = timeline

    def wrap(self, inner: WorkspaceProvider) -> WorkspaceProvider:
        return Poison(inner, self.timeline)

    def place(self, request: Request, stream: Stream) -> Block | None:
        block = self.inner.place(request, stream)
        if block is not None and block.nbytes:
            start = block.address + request.start(block.address)
            try:
                for extent in request.extents:
                    self._fill(start + extent.offset, extent.nbytes, extent.dtype.is_floating_point, stream)
            except BaseException:
                self.undo(block, stream, self.timeline)
                raise
        return block

    def give_back(self, block: Block | None, stream: Stream) -> None:
        try:
            if block is not None and block.nbytes:
                filling = self._stream_of_fill(stream)
                if filling is not None and self.timeline.fenceable(block, filling):
                    self._fill_released(block, filling)
        finally:
            self.inner.give_back(block, stream)

    def _fill_released(self, block: Block, stream: Stream) -> None:
        self.timeline.fence(block, stream)
        block.uses[stream.id] = stream.clock.epoch  # that of the fill
        request = block.request
        lead = request.lead if request is not None else 0
        self._fill(block.address + lead, block.nbytes - 2 * lead, False, stream)

    def _stream_of_fill(self, stream: Stream) -> Stream | None:
        """The stream on which a fill at release lands where the lease was; None where there is none.

        One that began to capture since would take the fill into its graph and repeat it at each replay; one between two
        segments would do it at once, to bytes that are the graph's; a raw stream may be gone.
        """
        timeline = self.timeline
        if stream.capture is not None:
            return self._unjoined(stream.capture)
        if stream.exact and not stream.communication:
            return None
        return None if timeline.call(timeline.driver.capture_of, stream.key) else stream

    def _unjoined(self, capture: Capture) -> Stream | None:
        """A stream of a capture that may still be given work: the present one inside a fork to it, else the origin.

        The acquirer's may have been joined since.
        """
        timeline = self.timeline
        if not timeline.takes_part(capture.origin.key, capture):
            return None
        if timeline.takes_part(timeline.current_key(), capture):
            present = timeline.current()
            if any(fork.has(present) for fork in timeline.state.held.open_forks()):
                return present
        return capture.stream(capture.origin)

    def fresh(self, request: Request, position: int, stream: Stream) -> Any:
        tensor = self.inner.fresh(request, position, stream)
        extent = request.extents[position]
        address = self.timeline.driver.address_of(tensor)
        self._fill(address, extent.nbytes, extent.dtype.is_floating_point, stream)
        return tensor

    def _fill(self, address: int, nbytes: int, floating: bool, stream: Stream) -> None:
        if nbytes:
            self.timeline.call(self.timeline.driver.memset, address, nbytes, FLOAT if floating else INTEGER, stream.key)
