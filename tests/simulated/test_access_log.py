"""The interval map against a check of every pair of accesses, byte by byte."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from workspace.simulated.access import AccessLog
from workspace.simulated.frontier import Conflict
from workspace.simulated.node import Node
from workspace.simulated.order import Point, Track

STREAMS = 3
BYTES = 10
spans = st.tuples(st.integers(0, BYTES - 1), st.integers(1, 6), st.booleans())
steps = st.one_of(
    st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("access"), st.integers(0, STREAMS - 1), st.lists(spans, min_size=1, max_size=2)),
)


def nodes_of(program: list[tuple]) -> list[Node]:
    tracks = [Track(key) for key in range(STREAMS)]
    nodes = []
    for verb, stream, what in program:
        track = tracks[stream]
        if verb == "wait":
            track.learn(tracks[what].point())
            continue
        track.position += 1
        reads = tuple((start, length) for start, length, write in what if not write)
        writes = tuple((start, length) for start, length, write in what if write)
        nodes.append(Node(stream, track.position, track.clock, "launch", f"{len(nodes)}", reads, writes))
    return nodes


def ordered(first: Node, second: Node) -> bool:
    return first.stream == second.stream or second.clock.get(first.stream, 0) >= first.position


def touched(node: Node, byte: int) -> tuple[bool, bool]:
    return tuple(any(a <= byte < a + n for a, n in ranges) for ranges in (node.reads, node.writes))


def racing_bytes(nodes: list[Node]) -> set[tuple[str, str, int]]:
    """(first, second, byte) of each conflict without an edge."""
    found = set()
    for index, second in enumerate(nodes):
        for first in nodes[:index]:
            for byte in range(BYTES + 6):
                (read, write), (reads, writes) = touched(first, byte), touched(second, byte)
                if not ordered(first, second) and ((write and (reads or writes)) or (read and writes)):
                    found.add((first.label, second.label, byte))
    return found


def logged_bytes(log: AccessLog, nodes: list[Node], conflicts: list[Conflict]) -> set[tuple[str, str, int]]:
    for node in nodes:
        log.add(node)
    return {(c.prior.label, c.node.label, byte) for c in conflicts for byte in range(c.start, c.end)}


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=25))
def test_every_unordered_pair_is_found_with_exactly_its_bytes(program: list[tuple]) -> None:
    conflicts: list[Conflict] = []
    nodes = nodes_of(program)
    assert logged_bytes(AccessLog(conflicts.append), nodes, conflicts) == racing_bytes(nodes)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, max_size=25), st.integers(0, 24))
def test_the_frontier_alone_finds_every_racing_access(program: list[tuple], compact_at: int) -> None:
    """With nothing but the frontier (the callback knows each pair) and compactions in between."""
    conflicts: list[Conflict] = []

    def known(conflict: Conflict) -> bool:
        conflicts.append(conflict)
        return False

    log, nodes = AccessLog(known), nodes_of(program)
    for index, node in enumerate(nodes):
        log.add(node)
        if index % 5 == compact_at % 5:
            log.compact({})
    racing = {(second, byte) for _, second, byte in racing_bytes(nodes)}
    assert {(c.node.label, byte) for c in conflicts for byte in range(c.start, c.end)} == racing


def test_adjacent_ranges_are_silent() -> None:
    conflicts: list[Conflict] = []
    log = AccessLog(conflicts.append)
    log.add(Node(1, 1, {}, "launch", "left", (), ((0, 16),)))
    log.add(Node(2, 1, {}, "launch", "right", (), ((16, 16),)))
    assert not conflicts
    log.add(Node(3, 1, {}, "launch", "both", ((15, 2),), ()))
    assert {(c.prior.label, c.start, c.end) for c in conflicts} == {("left", 15, 16), ("right", 16, 17)}


def test_settled_bytes_have_no_history_and_their_neighbours_keep_theirs() -> None:
    conflicts: list[Conflict] = []
    log = AccessLog(conflicts.append)
    log.add(Node(1, 1, {}, "launch", "write", (), ((0, 32),)))
    log.settle(8, 16, Point(1, 1, {}))
    log.add(Node(2, 1, {}, "launch", "reuse", (), ((8, 8),)))
    assert not conflicts
    log.add(Node(2, 2, {}, "launch", "too far", (), ((8, 9),)))
    assert [(c.start, c.end) for c in conflicts] == [(16, 17)]


def test_a_later_access_on_the_settled_stream_still_counts() -> None:
    conflicts: list[Conflict] = []
    log = AccessLog(conflicts.append)
    log.add(Node(1, 2, {}, "launch", "late", (), ((0, 32),)))
    log.settle(0, 32, Point(1, 1, {}))
    log.add(Node(2, 1, {}, "launch", "reuse", (), ((0, 32),)))
    assert len(conflicts) == 1


def test_forgotten_bytes_are_new_memory() -> None:
    conflicts: list[Conflict] = []
    log = AccessLog(conflicts.append)
    log.add(Node(1, 1, {}, "launch", "write", (), ((0, 32),)))
    log.forget(0, 32)
    log.add(Node(2, 1, {}, "launch", "write", (), ((0, 32),)))
    assert not conflicts


def test_compaction_joins_equal_neighbours_and_drops_what_the_host_saw() -> None:
    log = AccessLog(lambda conflict: None)
    node = Node(1, 1, {}, "launch", "write", (), ((0, 64),))
    log.add(node)
    for start in range(0, 64, 8):
        log.add(Node(1, 1, {}, "launch", "read", ((start, 4),), ()))
    pieces = len(log)
    log.compact({})
    assert 1 < len(log) <= pieces
    log.compact({1: 1})
    assert len(log) == 0
