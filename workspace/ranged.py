"""Leases with an NVTX range each, for Nsight Systems and Nsight Compute; the setting ``nvtx``.

A range is started and ended by its handle, not pushed and popped: NVTX's stack is a thread's, while a lease may be
released from another thread, and one thread may hold leases that overlap without nesting (two micro-batches in turn).
Only the class differs: without the setting leases have none of this, with it they take the same short ways.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from workspace.errors import ConfigError
from workspace.lazy import LazyLease, lazy_type
from workspace.lease import PLAIN, Lease, lease_type

if TYPE_CHECKING:
    from workspace.config import WorkspaceConfig
    from workspace.driver import Driver
    from workspace.layout import Layout


class Ranged(Lease):
    """A lease seen by a profiler from before its acquire until after its release, as ``workspace:OWNER``.

    In a capture it is the host's time there; a replay runs in no lease's range. Single tensors have none.
    """

    __slots__ = ()

    _range: int

    def __enter__(self) -> Lease:
        if self._state >= PLAIN:
            return super().__enter__()  # which refuses
        request = self.request
        ranges = request.timeline.driver.ranges
        self._range = ranges.range_start(f"workspace:{request.owner}")  # type: ignore[misc,union-attr]
        try:
            return super().__enter__()
        except BaseException:
            self._end()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = self._state >= PLAIN
        try:
            super().__exit__(kind, error, trace)
        finally:
            if held and self._state < PLAIN:  # else a collective failed, and it stays held until it is released again
                self._end()

    def outlived_capture(self) -> None:
        super().outlived_capture()
        self._end()

    def _end(self) -> None:
        self.request.timeline.driver.ranges.range_end(self._range)  # type: ignore[union-attr]


class RangedLease(Ranged):
    """A lease of a block with a range."""

    __slots__ = ("_range",)


class RangedLazyLease(Ranged, LazyLease):
    """A lease of slots with a range."""

    __slots__ = ("_range",)


def ranged_type(layout: Layout, lends_tensors: bool) -> type[Lease]:
    """The lease of a layout, with the names of its tensors."""
    return lease_type(layout, RangedLease) if lends_tensors else lazy_type(layout, RangedLazyLease)


def check_ranges(config: WorkspaceConfig, driver: Driver) -> None:
    """Raise `ConfigError` where ranges are asked for on a device that no profiler looks at."""
    if config.nvtx and driver.ranges is None:
        raise ConfigError(f"nvtx=true on {driver.name}, which no profiler sees", "set nvtx=false, or use a GPU")
