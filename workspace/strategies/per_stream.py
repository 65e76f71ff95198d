"""``per_stream``: a sub-pool for each stream, so that no fence is needed while each stream keeps to itself."""

from __future__ import annotations

from workspace.block import Block
from workspace.pool import Home
from workspace.request import Request
from workspace.strategies.pooled import Pooled
from workspace.streams import Stream


class PerStream(Pooled):
    """Blocks stay with the stream that used them; one migrates, whole and only when ordered, before the pool grows."""

    name = "per_stream"

    def home(self, stream: Stream) -> Home:
        return stream.id

    def elsewhere(self, request: Request, stream: Stream) -> Block | None:
        own = self.home(stream)
        for home in list(self.pool.free):
            if home != own:
                block = self.pool.ordered(request.nbytes, stream, home)
                if block is not None:
                    return block
        return None
