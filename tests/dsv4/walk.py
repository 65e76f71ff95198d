"""Host order and device order of a program, worked out without the framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from dsv4.topology import Acquire, Break, Fork, Node, Op, Release


@attrs.define(eq=False)
class Work:
    """One op with the set of ops that device order puts before it."""

    op: Op
    before: set[Work] = attrs.field(factory=set, repr=False)


def ops(nodes: Iterable[Node]) -> list[Op]:
    """All ops in host order."""
    return [work.op for work in ordered(nodes)]


def leases(nodes: Iterable[Node]) -> Iterator[Acquire | Release]:
    for node in nodes:
        if isinstance(node, Acquire | Release):
            yield node
        elif isinstance(node, Break):
            yield from leases(node.nodes)


def ordered(nodes: Iterable[Node], without_join: str = "") -> list[Work]:
    """Every op with everything ordered before it; `without_join` names a stream that no join waits for."""
    done: list[Work] = []
    known: dict[str, set[Work]] = {}

    def run(op: Op) -> None:
        seen = known.setdefault(op.stream, set())
        work = Work(op, set(seen))
        seen.add(work)
        done.append(work)

    def walk(nodes: Iterable[Node]) -> None:
        for node in nodes:
            if isinstance(node, Op):
                run(node)
            elif isinstance(node, Break):
                walk(node.nodes)
            elif isinstance(node, Fork):
                fork(node)

    def fork(node: Fork) -> None:
        parent = known.setdefault(node.parent, set())
        for branch in node.branches:
            known.setdefault(branch.stream, set()).update(parent)
        if not node.branches_first:
            walk(node.body)
        for branch in node.branches:
            walk(branch.nodes)
        if node.branches_first:
            walk(node.body)
        for branch in node.branches:
            if branch.stream != without_join:
                parent.update(known[branch.stream])

    walk(nodes)
    return done


def conflicts(works: list[Work]) -> set[tuple[str, str, str]]:
    """(earlier op, later op, temporary) of each pair that touches one temporary, one writing, in no order."""
    found = set()
    for position, late in enumerate(works):
        for early in works[:position]:
            if early in late.before:
                continue
            for name in set(early.op.writes) & {*late.op.reads, *late.op.writes}:
                found.add((early.op.label, late.op.label, name))
            for name in set(early.op.reads) & set(late.op.writes):
                found.add((early.op.label, late.op.label, name))
    return found
