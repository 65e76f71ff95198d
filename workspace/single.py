"""Single tensors, whose bytes return when their storage dies, and persistent zero-once buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from workspace.errors import CaptureError, LayoutError, StreamError
from workspace.holding import Held, Pinnable
from workspace.layout import TensorSpec
from workspace.request import Request
from workspace.streams import Stream

if TYPE_CHECKING:
    from workspace.block import Block, Uses
    from workspace.provider import WorkspaceProvider
    from workspace.timeline import Timeline
    from workspace.workspace import Workspace


def fake_mode() -> bool:
    """Whether a FakeTensorMode is active: what is lent then are fake tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class Single(Pinnable):
    """Bytes of one tensor on loan until its storage dies, views included. Not held by a thread: uses are declared."""

    __slots__ = ("address", "block", "dead", "nbytes", "offset", "provider", "workspace")

    def __init__(
        self, workspace: Workspace, stream: Stream, provider: WorkspaceProvider, block: Block, request: Request
    ) -> None:
        self.workspace = workspace
        self.stream = stream
        self.uses = self.replays = self.events = None
        self.held = Held()  # no thread's: a finaliser ends it
        self.pins = 0
        self.provider = provider
        self.block = block
        self.offset = request.start(block.address)
        self.address = block.address + self.offset
        self.nbytes = request.payload
        self.dead = False

    @property
    def parent(self) -> WorkspaceProvider:
        return self.provider

    def stamped(self, timeline: Timeline) -> Uses:
        if self.workspace.config.strict_streams:
            for stream in timeline.at_work(None):
                self.declare(stream)
        return super().stamped(timeline)

    def died(self) -> None:
        # The storage's finaliser: no lock, no device call. The use is stamped when the next acquire drains the queue.
        self.workspace.timeline.later(self.collect)

    def collect(self) -> None:
        """Give the bytes back. Called with the lock held."""
        self.dead = True
        self.workspace.singles.pop(self.address, None)
        uses = self.stamped(self.workspace.timeline)
        if self.pins:
            self.replayed(uses, self.workspace.timeline)
        else:
            self._return(self.last_uses(uses))

    def let_go(self) -> None:
        if self.dead:
            self._return(self.last_uses({}))

    def _return(self, uses: dict[int, int]) -> None:
        self.block.uses, self.block.events = uses, self.events
        self.provider.give_back(self.block, self.stream)


def lend_single(workspace: Workspace, shape: tuple[int, ...], dtype: torch.dtype, owner: str) -> Any:
    """Place one tensor on the current stream; see `Workspace.empty`."""
    if fake_mode():
        return torch.empty(tuple(shape), dtype=dtype, device=workspace.driver.device)
    request = workspace.single_request(tuple(shape), dtype, owner)
    timeline = workspace.timeline
    with timeline.lock:
        timeline.ready()
        workspace.check_open(request.owner)
        stream = timeline.current()
        if not request.nbytes:
            return timeline.call(timeline.driver.empty, request.extents[0].shape, dtype, stream.key)
        if stream.exact and not stream.communication:
            raise StreamError(
                f"a single tensor on {stream!r}, a stream the library does not own",
                "use a scoped lease there: its last use is recorded at release, before the handle can be destroyed",
            )
        if stream.capture is not None:
            raise CaptureError(
                f"a single tensor of {owner} inside a capture has no release point", "use a lease, or make it before"
            )
        provider = workspace.provider
        if not provider.lends_tensors:
            return provider.fresh(request, 0, stream)
        block = provider.place(request, stream)
        if block is None:
            raise TypeError(f"strategy {provider.name} lends tensors and placed no block")
        single = Single(workspace, stream, provider, block, request)
        offset = block.slab.start + block.offset + single.offset
        with torch.inference_mode(False):
            tensor = timeline.driver.tensor(block.slab.buffer, offset, request.extents[0].shape, dtype, single.died)
        workspace.singles[single.address] = single
        if timeline.driver.attributes:
            timeline.driver.owner_of(block.address, block.nbytes, request.owner)
        return tensor


class Persistent:
    """Buffers that live as long as the workspace and are zero once, when they are made."""

    def __init__(self, workspace: Workspace) -> None:
        self._timeline = workspace.timeline
        self._prefix = workspace.name
        self._buffers: dict[str, Any] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """See `Workspace.persistent`."""
        timeline = self._timeline
        with timeline.lock:
            timeline.ready()
            if fake_mode():
                return torch.zeros(tuple(shape), dtype=dtype, device=timeline.driver.device)
            found = self._buffers.get(name)
            if found is not None:
                if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
                    raise LayoutError(
                        f"persistent {name!r} is {tuple(found.shape)} {found.dtype}, asked as {tuple(shape)} {dtype}",
                        "use one shape and dtype for each name",
                    )
                return found
            _, nbytes = TensorSpec(tuple(shape), dtype).resolve({})
            stream = timeline.current()
            if stream.capture is not None:
                raise CaptureError(
                    f"persistent {name!r} is first asked for inside a capture", "ask for it once before the capture"
                )
            driver = timeline.driver
            buffer = timeline.call(driver.alloc, nbytes, stream.key)
            with torch.inference_mode(False):
                tensor = driver.tensor(buffer, 0, tuple(shape), dtype)
            driver.owner_of(buffer.address, nbytes, f"{self._prefix}/{name}" if self._prefix else name)
            if nbytes:
                timeline.call(driver.memset, buffer.address, nbytes, 0, stream.key)
            # Any stream may use it from now on, without a fence of its own: made once, so the host may wait.
            timeline.synchronize(stream)
            self._buffers[name] = tensor
            return tensor

    def held(self) -> dict[str, int]:
        """Bytes of each buffer by name."""
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self._buffers.items()}

    def clear(self) -> None:
        """Let go of them once the device is idle: their uses were declared to nobody."""
        if self._buffers:
            self._timeline.synchronize()
            self._buffers.clear()
