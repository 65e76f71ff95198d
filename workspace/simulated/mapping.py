"""Bytes straight from the device, whose addresses stay reserved while there is no memory behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workspace.simulated.storage import Storage


class Mapping:
    """A segment of the device's own; see `workspace.driver.Mapping`.

    Attributes
    ----------
    address
        First byte.
    nbytes
        Size.
    mapped
        Whether there is memory behind the addresses.
    """

    __slots__ = ("__weakref__", "_device", "_gone", "address", "mapped", "nbytes")

    def __init__(self, device: Storage, address: int, nbytes: int, gone: Callable[[int], None]) -> None:
        self._device = device
        self._gone = gone
        self.address = address
        self.nbytes = nbytes
        self.mapped = True

    def __workspace_range__(self) -> tuple[int, int]:
        return self.address, self.nbytes

    def unmap(self) -> None:
        """Give the memory back; the device finishes its work first."""
        if self.mapped:
            self._device.unmap(self.address)
            self.mapped = False

    def remap(self) -> None:
        """Put memory behind the addresses again. Raises `OutOfMemory`."""
        if not self.mapped:
            self._device.remap(self.address)
            self.mapped = True

    def __del__(self) -> None:
        # A finaliser: it takes no lock and calls no device.
        self._gone(self.address)
