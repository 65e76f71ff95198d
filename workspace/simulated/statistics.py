"""What the caching allocator holds, now and at most."""

from __future__ import annotations


class Statistics:
    """Bytes by state, as ``torch.cuda.memory_stats`` counts them.

    Attributes
    ----------
    allocated, reserved, requested
        Bytes handed out (rounded), obtained from the device, and asked for by callers.
    peak_allocated, peak_reserved
        The most since the last `reset_peaks`.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.requested = 0
        self.peak_allocated = self.peak_reserved = 0

    def allocate(self, size: int, requested: int) -> None:
        self.allocated += size
        self.requested += requested
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, size: int, requested: int) -> None:
        self.allocated -= size
        self.requested -= requested

    def reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def unreserve(self, size: int) -> None:
        self.reserved -= size

    def reset_peaks(self) -> None:
        """Peaks start again from the present."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def snapshot(self) -> dict[str, int]:
        return dict(vars(self))
