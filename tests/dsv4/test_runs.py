"""Merging ops into runs keeps every conflict and joins nothing across a lease or an event."""

from __future__ import annotations

import pytest

from dsv4.config import LayerKind
from dsv4.runs import runs
from dsv4.topology import EXIT, Acquire, Conditions, Node, Op, Release, layer
from tests.dsv4.walk import conflicts, ops, ordered

C4, C128 = LayerKind.C4, LayerKind.C128


def model() -> tuple[Node, ...]:
    return (*layer(C128, Conditions(), True), *layer(C4, Conditions(), False), *layer(C128, Conditions(), False), *EXIT)


def test_a_run_has_the_accesses_of_its_ops() -> None:
    separate, merged = ops(model()), ops(runs(model()))
    assert len(merged) < 0.6 * len(separate)
    assert [label for op in merged for label in op.label.split("+")] == [op.label for op in separate]
    rest = iter(separate)
    for op in merged:
        parts = [next(rest) for _ in op.label.split("+")]
        assert set(op.writes) == {name for one in parts for name in one.writes}
        assert set(op.reads) == {name for one in parts for name in one.reads} - set(op.writes)


def test_a_lease_s_begin_and_end_stay_between_their_ops() -> None:
    def leases(nodes: tuple[Node, ...]) -> list[Node]:
        return [node for node in nodes if isinstance(node, Acquire | Release)]

    merged = runs(model())
    assert leases(merged) == leases(model())
    assert not any(
        isinstance(one, Op) and isinstance(other, Op) and one.stream == other.stream
        for one, other in zip(merged, merged[1:], strict=False)
    )


@pytest.mark.parametrize("stream", ["", "aux0", "aux1", "aux2"])
def test_races_are_the_same_by_tensor(stream: str) -> None:
    """With and without each join; only labels differ."""
    separate = {name for *_, name in conflicts(ordered(model(), without_join=stream))}
    merged = {name for *_, name in conflicts(ordered(runs(model()), without_join=stream))}
    assert separate == merged
    assert bool(merged) == bool(stream)
