"""One request's blocks in every group."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.groups import Group
from dsv4.errors import RequestError


class Sequence:
    """Block tables of one request.

    A table has an entry per block of the whole context: -1 where the block has left the group's window and was freed.

    Parameters
    ----------
    groups, allocators
        By name, the same names.

    Attributes
    ----------
    tables
        Block numbers by group.
    """

    def __init__(self, groups: tuple[Group, ...], allocators: Mapping[str, BlockAllocator]) -> None:
        self._groups = groups
        self._allocators = allocators
        self._trimmed = {group.name: 0 for group in groups}
        self.tables: dict[str, list[int]] = {group.name: [] for group in groups}

    def extend(self, start: int, end: int) -> None:
        """Room for rows at positions start to end - 1; what no row from start on reads is freed before.

        Raises
        ------
        CacheFull
            Some group has too few blocks. No group then has taken any; what was freed stays free.
        RequestError
            The rows do not follow what the sequence holds.
        """
        for group in self._groups:
            held = len(self.tables[group.name]) * group.block_tokens
            if start > held or end <= start:
                raise RequestError(
                    f"rows {start} to {end} do not follow the {held} positions held", "extend in order, without gaps"
                )
        self.trim(start)
        taken: dict[str, list[int]] = {}
        try:
            for group in self._groups:
                missing = -(-end // group.block_tokens) - len(self.tables[group.name])
                taken[group.name] = self._allocators[group.name].take(max(0, missing))
        except RequestError:
            for name, blocks in taken.items():
                self._allocators[name].give_back(blocks)
            raise
        for name, blocks in taken.items():
            self.tables[name] += blocks

    def trim(self, position: int) -> None:
        """Free the blocks that no row at this position or later reads."""
        for group in self._groups:
            table = self.tables[group.name]
            until = min(group.first_needed(position) // group.block_tokens, len(table))
            done = self._trimmed[group.name]
            self._allocators[group.name].give_back(table[done:until])
            table[done:until] = [-1] * max(0, until - done)
            self._trimmed[group.name] = max(done, until)

    def free(self) -> None:
        """Give everything back: the request is finished or cancelled. Twice is no error."""
        for group in self._groups:
            table = self.tables[group.name]
            self._allocators[group.name].give_back(block for block in table if block >= 0)
            table.clear()
            self._trimmed[group.name] = 0
