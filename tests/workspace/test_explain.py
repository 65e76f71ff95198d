"""Explanations and snapshots: which fences, growths and refusals there were, between whom, and why."""

from __future__ import annotations

import pytest

from tests.workspace.scene import BYTES, MIB, OTHER, SLAB, scene, write
from workspace.errors import CapacityError


def test_a_fence_is_explained_by_both_users_and_the_missing_edge() -> None:
    """Owner and site of the asker, owner before, and what the stream would have had to know."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    for _ in range(3):
        with ws.on(one), ws.lease(OTHER, N=SLAB):
            pass
        with ws.on(two), ws.lease(BYTES, N=SLAB):
            pass
    fences = [(reason, count) for reason, count in ws.explain() if reason.kind == "fence"]
    assert sorted((reason.owner, reason.other, count) for reason, count in fences) == [
        ("bytes", "other", 3), ("other", "bytes", 2),
    ]  # fmt: skip
    text = str(next(reason for reason, _ in fences if reason.owner == "bytes"))
    assert text.startswith("fence for bytes at ") and "test_explain.py:" in text and "used before by other" in text
    assert "two knows one up to 0, needs 1" in text
    assert ws.snapshot().fences == 5 == sum(count for _, count in fences)


def test_growths_and_refusals_are_explained() -> None:
    """With the site in the caller's code."""
    _, ws = scene(reserve=MIB)
    with ws.lease(BYTES, N=4 * SLAB):
        pass
    ws.lock()
    for _ in range(2):
        with pytest.raises(CapacityError):
            ws.acquire(OTHER, N=40 * SLAB)
    found = {(reason.kind, reason.owner): (count, reason.site) for reason, count in ws.explain()}
    assert found["growth", "bytes"][0] == 1 and found["refusal", "other"][0] == 2
    assert all("test_explain.py:" in site for _, site in found.values())


def test_the_most_frequent_come_first_and_only_so_many() -> None:
    """Ordered by count."""
    device, ws = scene()
    streams = [ws.stream(str(index)) for index in range(4)]
    for times, stream in enumerate(streams):
        for _ in range(times + 1):
            write(device, ws, "a", SLAB, 0)
            with ws.on(stream), ws.lease(OTHER, N=SLAB):
                pass
    counts = [count for _, count in ws.explain(3)]
    assert len(counts) <= 3 and counts == sorted(counts, reverse=True)


def test_an_elided_fence_is_counted_and_not_explained() -> None:
    """A use on another stream that the clocks show ordered costs nothing."""
    device, ws = scene()
    one, two = ws.stream("one"), ws.stream("two")
    write(device, ws, "first", SLAB, one)
    event = ws.event()
    event.record(one)
    event.wait(two)
    write(device, ws, "second", SLAB, two)
    assert ws.snapshot().elided == 1 and not [one for one, _ in ws.explain() if one.kind == "fence"]


@pytest.mark.parametrize("strategy", ["event_fenced", "per_stream"])
def test_a_snapshot_adds_up(strategy: str) -> None:
    """Owners add up to what is allocated, slabs and retired bytes to what is reserved."""
    _, ws = scene(strategy, reserve=MIB)
    with ws.lease(BYTES, N=300), ws.lease(OTHER, N=5 * SLAB), ws.lease(BYTES, N=10):
        snapshot = ws.snapshot()
        assert {name: owner.allocated for name, owner in snapshot.owners.items()} == {
            "bytes": 512 + 256, "other": 5 * SLAB,
        }  # fmt: skip
        assert snapshot.allocated == 768 + 5 * SLAB
        assert sum(snapshot.slabs) + snapshot.retired == snapshot.reserved == snapshot.peak_reserved
        assert (snapshot.strategy, snapshot.growths) == (strategy, 1)
    assert ws.snapshot().allocated == 0 and ws.snapshot().owners == {}
