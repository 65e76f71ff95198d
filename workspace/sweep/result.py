"""What one cell of the sweep measured."""

from __future__ import annotations

import attrs

from workspace.sweep.plan import REFERENCE, Cell


@attrs.frozen
class Sample:
    """Bytes on loan at one moment.

    Attributes
    ----------
    step
        Index of the step.
    launch
        Operations the step had enqueued before this moment.
    allocated
        Bytes on loan.
    reserved
        Bytes held from the device.
    owners
        Bytes on loan by owner.
    """

    step: int
    launch: int
    allocated: int
    reserved: int
    owners: dict[str, int]


@attrs.frozen
class Judgement:
    """The clock check's word on one cell.

    Attributes
    ----------
    verdict
        ``"SAFE"``, ``"UNSAFE"`` or ``"UNKNOWN"``.
    races
        Pairs of conflicting accesses that no edge orders.
    accesses
        Accesses that were checked.
    first
        The first race in words, or the reason of UNKNOWN; empty when safe.
    """

    verdict: str
    races: int
    accesses: int
    first: str


@attrs.frozen
class Numbers:
    """What the workload's small configuration computed in one cell.

    Attributes
    ----------
    schedules
        Seeded schedules it ran under.
    equal
        How often every result had the bits of `caching` in the same setting.
    failed
        How often an operator failed on what it was given.
    """

    schedules: int
    equal: int
    failed: int


@attrs.frozen
class Bytes:
    """Most bytes on loan, and held from the device, at any time of the replay; each owner's own peak."""

    peak_allocated: int
    peak_reserved: int
    retired: int
    owners: dict[str, int]


@attrs.frozen
class HostCost:
    """Host time of one step of a cell in us; see `workspace.sweep.host_time`.

    Attributes
    ----------
    us
        Mean over steps of the least of three replays.
    replays_us
        The mean over steps of each of the three; how far they lie apart.
    again_us
        Of `caching`: as `us`, on a second workspace that took each step, too.
    """

    us: float
    replays_us: tuple[float, ...]
    again_us: float | None = None


@attrs.frozen
class Result:
    """All measurements of one cell.

    Attributes
    ----------
    steps, tokens
        What was replayed.
    bytes, counters, driver_calls
        Over the replay, without what preparing the model took.
    host_us, host_replays_us, host_again_us
        As of `HostCost`.
    judgement
        Of the replay and the preparation together.
    envelope
        For each step the moment with most bytes on loan; empty unless asked for.
    detail
        Consecutive moments of the step with most tokens; empty unless asked for.
    numbers
        None unless asked for.
    """

    cell: Cell
    steps: int
    tokens: int
    bytes: Bytes
    counters: dict[str, int]
    driver_calls: dict[str, int]
    host_us: float
    judgement: Judgement
    envelope: tuple[Sample, ...] = ()
    detail: tuple[Sample, ...] = ()
    numbers: Numbers | None = None
    host_replays_us: tuple[float, ...] = ()
    host_again_us: float | None = None

    @property
    def sound(self) -> bool:
        """Whether nothing speaks against the strategy: it is judged ``SAFE``, and has the numbers of `caching`."""
        numbers = self.numbers
        return self.judgement.verdict == "SAFE" and (numbers is None or numbers.equal == numbers.schedules)


@attrs.frozen
class Refused:
    """A cell the strategy or the workload refused, with the typed error's text."""

    cell: Cell
    problem: str
    remedy: str


def host_ratios(results: list[Result], reference: str = REFERENCE) -> dict[Cell, float]:
    """Host time of each cell over that of the reference strategy in the same setting, where that was run."""
    base = {result.cell.setting: result.host_us for result in results if result.cell.strategy == reference}
    return {
        result.cell: result.host_us / base[result.cell.setting] for result in results if result.cell.setting in base
    }


def repeated_ratios(results: list[Result]) -> list[float]:
    """Host time of `caching` over its own, timed twice in a setting: how far a ratio may lie from 1 for nothing."""
    return [result.host_again_us / result.host_us for result in results if result.host_again_us is not None]
