"""Snapshots: what a workspace holds, by owner, pulled when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from workspace.adaptors.compose import find
from workspace.adaptors.statistics import OwnerBytes, Statistics
from workspace.provider import Held

if TYPE_CHECKING:
    from workspace.workspace import Workspace


@attrs.frozen
class Snapshot:
    """One moment of a workspace; bytes throughout.

    Attributes
    ----------
    strategy
        Its name.
    allocated, peak_allocated
        Out on lease now, and the most so far while ``statistics`` is on (else 0); rounding and guard bands included.
    reserved, peak_reserved
        Obtained from the framework's allocator; 0 under strategies that let it place each tensor.
    retired, pinned
        Bytes of slabs given up that a tensor keeps alive, and the owners of such tensors.
    footprints
        Bytes of each lane that graphs pin.
    owners
        Bytes on loan by owner; peaks and counts are kept while ``statistics`` is on.
    fences, elided, growths
        Fences made on the device's timeline; uses on other streams that the clocks showed ordered; slabs obtained
        after the reservation.
    asleep
        Whether the workspace sleeps.
    persistent, staging
        Bytes of persistent buffers on the device, and of pinned memory of the host, by name; those of owners included.
    """

    strategy: str
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    retired: int
    pinned: tuple[str, ...]
    slabs: tuple[int, ...]
    footprints: dict[str, int]
    owners: dict[str, OwnerBytes]
    fences: int
    elided: int
    growths: int
    asleep: bool
    persistent: dict[str, int]
    staging: dict[str, int]


def take_snapshot(workspace: Workspace) -> Snapshot:
    """Pull a snapshot from the provider. Called with the timeline's lock held."""
    held: Held = workspace.provider.held()
    statistics = find(workspace.provider, Statistics)
    if isinstance(statistics, Statistics):
        owners, peak = {name: attrs.evolve(one) for name, one in statistics.owners.items()}, statistics.total.peak
    else:
        owners, peak = _on_loan(workspace), 0
    lanes: dict[str, int] = getattr(workspace.strategy_object, "lanes", dict)()
    persistent, staging = workspace.buffers()
    return Snapshot(
        strategy=workspace.strategy,
        allocated=held.allocated,
        peak_allocated=peak,
        reserved=held.reserved,
        peak_reserved=held.peak_reserved,
        retired=held.retired,
        pinned=held.pinned,
        slabs=held.slabs,
        footprints=lanes,
        owners=owners,
        fences=workspace.timeline.fences,
        elided=getattr(workspace.strategy_object, "elided", 0),
        growths=held.growths,
        asleep=workspace.asleep,
        persistent=persistent,
        staging=staging,
    )


def _on_loan(workspace: Workspace) -> dict[str, OwnerBytes]:
    pool = getattr(workspace.strategy_object, "pool", None)
    found: dict[str, int] = {} if pool is None else pool.on_loan()
    return {owner: OwnerBytes(allocated=nbytes, peak=nbytes) for owner, nbytes in found.items()}
