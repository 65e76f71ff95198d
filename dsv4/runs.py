"""Consecutive ops of one stream as one launch with the union of their accesses.

Within a run no lease begins or ends and no event is recorded or awaited, so whatever orders one of its ops
against another stream's work orders them all: the clock check finds the same races, named by the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby

import attrs

from dsv4.topology import Branch, Break, Fork, Node, Op


@lru_cache(maxsize=8192)
def runs(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The same nodes, each stretch of ops merged into one."""
    found: list[Node] = []
    for _, stretch in groupby(nodes, key=lambda node: node.stream if isinstance(node, Op) else None):
        part = list(stretch)
        ops = [node for node in part if isinstance(node, Op)]
        found += [_run(ops)] if ops else [_inside(node) for node in part]
    return tuple(found)


def _inside(node: Node) -> Node:
    if isinstance(node, Break):
        return Break(runs(node.nodes))
    if isinstance(node, Fork):
        branches = tuple(Branch(branch.stream, runs(branch.nodes)) for branch in node.branches)
        return attrs.evolve(node, branches=branches, body=runs(node.body))
    return node


def _run(ops: list[Op]) -> Op:
    writes = _once(name for op in ops for name in op.writes)
    reads = _once(name for op in ops for name in op.reads if name not in writes)
    return Op("+".join(op.label for op in ops), ops[0].stream, reads, writes)


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
