"""An arena for one call of an op: arguments as leases lie, between guard bands, each with a storage of its own."""

from __future__ import annotations

import gc

import attrs
import torch

from workspace.config import WorkspaceConfig
from workspace.create import create
from workspace.driver import Driver
from workspace.layout import ALIGNMENT, round_up

BAND = ALIGNMENT
GUARD = 0xA5
POISON = (0xCB, 0xFF)
"""Contents of an out before the first and the second call; of a bool, where other values do not exist, 1 and 0."""


def poison(dtype: torch.dtype, turn: int) -> int:
    """The byte an out of this dtype is filled with before a call."""
    return (1, 0)[turn] if dtype is torch.bool else POISON[turn]


@attrs.define
class Placed:
    """One tensor argument in the arena.

    Attributes
    ----------
    name
        Of the argument, with its place in a list.
    offset, nbytes
        Where its bytes lie in the arena.
    before
        What they held when the op was called.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    nbytes: int
    before: bytes = b""
    dead: bool = False

    def died(self) -> None:
        """The storage's finaliser."""
        self.dead = True


class Arena:
    """Bytes of one device that arguments are placed in.

    Parameters
    ----------
    tensors
        Name and contents of each argument.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.placed: dict[str, Placed] = {}
        end = BAND
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            self.placed[name] = Placed(name, tuple(tensor.shape), tensor.dtype, end, nbytes)
            end = round_up(end + nbytes + 2 * BAND, ALIGNMENT)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        # Not with the user's settings, which say nothing about an op.
        self.driver: Driver = create(device=device, config=WorkspaceConfig()).driver
        self.buffer = self.driver.alloc(end, self.driver.current_stream())
        self.nbytes = end
        self.bytes = self._tensor(0, (end,), torch.uint8)
        self.bytes.fill_(GUARD)
        for name, tensor in tensors.items():
            if tensor.numel():
                self.view(name).copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))

    def view(self, name: str) -> torch.Tensor:
        """The bytes of an argument."""
        one = self.placed[name]
        return self.bytes[one.offset : one.offset + one.nbytes]

    def tensor(self, name: str) -> torch.Tensor:
        """The argument as the op gets it; `Placed.dead` tells when nobody holds it, or a view of it, any more."""
        one = self.placed[name]
        one.before = self.read(one.offset, one.nbytes)
        found: torch.Tensor = self.driver.tensor(self.buffer, one.offset, one.shape, one.dtype, one.died)
        return found

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes as they are now, on the host."""
        return bytes(self.bytes[offset : offset + nbytes].cpu().numpy())

    def address(self, name: str) -> int:
        """First byte of an argument."""
        return self.buffer.address + self.placed[name].offset

    def owners(self, tensor: torch.Tensor) -> list[str]:
        """Arguments whose bytes a tensor's storage shares."""
        start = tensor.untyped_storage().data_ptr()
        end = start + tensor.untyped_storage().nbytes()
        return [
            name
            for name, one in self.placed.items()
            if start < self.address(name) + max(one.nbytes, 1) and self.address(name) < end
        ]

    def damage(self) -> list[str]:
        """Guard bands that were written: which argument's, on what side, how many bytes."""
        found = []
        for name, one in self.placed.items():
            for side, offset in (("before", one.offset - BAND), ("after", one.offset + one.nbytes)):
                wrong = [at for at, value in enumerate(self.read(offset, BAND)) if value != GUARD]
                if wrong:
                    at = wrong[0] - BAND if side == "before" else wrong[0]
                    found.append(f"writes {len(wrong)} bytes {side} {name!r}, the first at {at:+d}")
        return found

    def kept(self) -> list[str]:
        """Arguments that somebody still holds, or a view of them, after the caller let go of them."""
        if not all(one.dead for one in self.placed.values() if one.nbytes):
            gc.collect()
        return [name for name, one in self.placed.items() if one.nbytes and not one.dead]

    def _tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found: torch.Tensor = self.driver.tensor(self.buffer, offset, shape, dtype)
        return found
