"""Bytes handed out by the caching allocator, given back when the last reference dies."""

from __future__ import annotations

from collections.abc import Callable

from workspace.simulated.blocks import Block


class Buffer:
    """A block of the device's caching allocator; see `workspace.driver.Buffer`.

    Attributes
    ----------
    address
        First byte; 0 when the buffer is empty.
    nbytes
        Bytes asked for.
    stream
        Key of the stream it was allocated for.
    block
        The allocator's block, None when the buffer is empty.
    """

    __slots__ = ("__weakref__", "_give_back", "address", "block", "nbytes", "stream")

    def __init__(self, nbytes: int, stream: int, block: Block | None, give_back: Callable[[Block], None]) -> None:
        self.address = 0 if block is None else block.address
        self.nbytes = nbytes
        self.stream = stream
        self.block = block
        self._give_back = give_back

    def __workspace_range__(self) -> tuple[int, int]:
        return self.address, self.nbytes

    def __del__(self) -> None:
        if self.block is not None:
            self._give_back(self.block)
