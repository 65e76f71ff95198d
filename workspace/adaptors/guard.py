"""Guard bands: a pattern before and after each lease, looked at when it is released."""

from __future__ import annotations

from workspace.adaptors.adaptor import Adaptor
from workspace.block import Block
from workspace.changed import changed
from workspace.errors import GuardError
from workspace.provider import WorkspaceProvider
from workspace.request import Request
from workspace.streams import Stream
from workspace.timeline import Timeline

PATTERN = 0xA5


class Guard(Adaptor):
    """Writes the bands at acquire; at release synchronises the acquirer's stream and compares them (debugging only).

    Inside a capture nothing can be read back: the bands are written, and a replay's damage shows in what lies there.

    A tensor that was changed in place is found as well: of another shape, as torch makes an ``out=`` of too many rows,
    of other strides or bytes, or one that requires a gradient. It is forgotten: the next lease of its layout would have
    got it so.
    """

    def __init__(self, inner: WorkspaceProvider, timeline: Timeline) -> None:
        super().__init__(inner)
        self.timeline = timeline

    def wrap(self, inner: WorkspaceProvider) -> WorkspaceProvider:
        return Guard(inner, self.timeline)

    def place(self, request: Request, stream: Stream) -> Block | None:
        block = self.inner.place(request, stream)
        if block is not None:
            try:
                for offset, nbytes in self._bands(block, request):
                    self.timeline.call(self.timeline.driver.memset, block.address + offset, nbytes, PATTERN, stream.key)
            except BaseException:
                self.undo(block, stream, self.timeline)
                raise
        return block

    def give_back(self, block: Block | None, stream: Stream) -> None:
        damage: GuardError | None = None
        try:
            if block is not None:
                damage = self._changed(block) or self._damage(block, stream)
        finally:
            self.inner.give_back(block, stream)
        if damage is not None:
            raise damage

    def _changed(self, block: Block) -> GuardError | None:
        request = block.request
        found = changed(request, block, block.views.get(request, [])) if request is not None else None
        if request is None or found is None:
            return None
        block.forget_views(request)
        name, how = found
        return GuardError(
            f"{name!r} of the lease of {request.owner} was changed in place: it {how}",
            "pass an op an out of the very shape that it writes, and change a view of a tensor, not the tensor",
            owner=request.owner, tensor=name,
        )  # fmt: skip

    def _damage(self, block: Block, stream: Stream) -> GuardError | None:
        request = block.request
        driver = self.timeline.driver
        if request is None or stream.capture is not None or not self.timeline.settle(block):
            return None
        for offset, nbytes in self._bands(block, request):
            found = self.timeline.call(driver.read, block.slab.buffer, block.slab.start + block.offset + offset, nbytes)
            wrong = [position for position, value in enumerate(found) if value != PATTERN]
            if wrong:
                where = "before" if offset < request.lead else "after"
                at = wrong[0] - nbytes if where == "before" else wrong[0]
                return GuardError(
                    f"{len(wrong)} bytes {where} the lease of {request.owner} were written, the first at {at:+d} bytes "
                    f"from its {'start' if where == 'before' else 'end'}",
                    "correct the op that writes outside its tensor; `workspace.testing.leasecheck` finds it",
                    owner=request.owner, count=len(wrong), offset=at,
                )  # fmt: skip
        return None

    @staticmethod
    def _bands(block: Block, request: Request) -> list[tuple[int, int]]:
        """Offset in the block and bytes of each band."""
        start = request.start(block.address)
        end = start + request.payload
        bands = [(start - request.lead, request.lead), (end, min(request.lead, block.nbytes - end))]
        return [(offset, nbytes) for offset, nbytes in bands if nbytes > 0]
