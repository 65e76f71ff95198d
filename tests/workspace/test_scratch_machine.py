"""Every pooled strategy survives random programs; without its fences, or without declared uses, it does not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.workspace.scene import MIB
from tests.workspace.scratch_machine import ScratchMachine
from tests.workspace.scratch_program import STATEFUL
from workspace import Lease
from workspace.block import Block, Uses
from workspace.fork import Fork
from workspace.holding import Holding
from workspace.lane import Lane
from workspace.pool import Pool
from workspace.streams import Stream
from workspace.timeline import Timeline

CASES: list[tuple[str, dict[str, Any]]] = [
    ("event_fenced", {}),
    ("per_stream", {}),
    ("event_fenced", {"steady": True}),
    ("per_stream", {"steady": True}),
    ("event_fenced", {"steady": True, "full": True}),
    ("per_stream", {"steady": True, "full": True}),
    ("event_fenced", {"steady": True, "config": {"granularity": 512}}),
    ("event_fenced", {"steady": True, "config": {"restorable": True}}),
    ("per_stream", {"config": {"restorable": True}}),
    ("event_fenced", {"config": {"recording": "exact", "strict_streams": True}}),
    ("event_fenced", {"config": {"policy": "fence", "statistics": True}}),
    ("per_stream", {"steady": True, "config": {"policy": "grow,fence", "capacity": 16 * MIB}}),
    ("per_stream", {"config": {"in_flight": 2, "poison": True}}),
]


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """The programs collect garbage to end graphs: what exists before them need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def machine(strategy: str, attributes: dict[str, Any]) -> type[ScratchMachine]:
    return type("Scratch", (ScratchMachine,), {"strategy": strategy, **attributes})


def names(value: Any) -> str:
    if isinstance(value, str):
        return value
    return ",".join(sorted({**value, **value.get("config", {})}.keys() - {"config"})) or "default"


@pytest.mark.parametrize(("strategy", "attributes"), CASES, ids=names)
def test_random_programs_are_safe(strategy: str, attributes: dict[str, Any]) -> None:
    """Whatever the program does, there is no race, no overlap and no lost byte."""
    run_state_machine_as_test(machine(strategy, attributes), settings=STATEFUL)


# -- controls: what is removed must be missed -----------------------------------------------------------------


def no_fence(timeline: Timeline, block: Block, stream: Stream) -> int:
    return 0


def nothing_declared(holding: Holding, stream: Stream) -> None:
    pass


def every_block_fits(pool: Pool, nbytes: int, stream: Stream, home: int) -> Block | None:
    return next(iter(pool._fitting(nbytes, home)), None)


def forks_unknown(fork: Fork, lease: Holding) -> tuple[Stream, ...]:
    return ()


def replays_unknown(lane: Lane, uses: Uses) -> None:
    pass


CONTROLS: list[tuple[type, str, Callable[..., Any]]] = [
    (Timeline, "fence", no_fence),
    (Pool, "ordered", every_block_fits),
    (Lease, "declare", nothing_declared),
    (Fork, "branches_of", forks_unknown),
    (Lane, "leave", replays_unknown),
]


@pytest.mark.parametrize(("owner", "seam", "change"), CONTROLS, ids=[one[2].__name__ for one in CONTROLS])
def test_a_missing_edge_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, seam: str, change: Callable[..., Any]
) -> None:
    """The same programs race once a fence, a check or a declaration is removed."""
    monkeypatch.setattr(owner, seam, change)
    with pytest.raises(AssertionError, match="UNSAFE"):
        run_state_machine_as_test(machine("event_fenced", {}), settings=settings(STATEFUL, max_examples=4000))
