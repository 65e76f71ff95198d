"""torch.compile through inductor: each op, scenario m1 (leases as outs) and m3 (ops that share scratch and a cache)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import workspace
from benchmarks.kernels.calls import call
from benchmarks.kernels.maker import Call
from dsv4 import ops
from tests.dsv4.cuda.check import same_bits
from tests.dsv4.cuda.families import FAMILIES
from workspace.testing import LeaseCheckError, leasecheck, removed

ROWS = (6, 19)
"""Two shapes through one compiled function."""

DELAY = 40_000_000
"""Cycles of a delay kernel: longer than the host needs to enqueue a program."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What other tests compiled counts towards no limit here."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="inductor", dynamic=True, **how)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_op_is_equal_to_eager(name: str) -> None:
    """Whole graphs, in which the op's outs are read by what inductor makes itself."""
    op = call(name, 1).op

    def function(inputs: Any, outs: Any, scratch: Any) -> list[torch.Tensor]:
        op(*inputs, out=outs or None, scratch=scratch or None)
        return [one.float() * 2 for one in outs if one.dtype.itemsize > 1]

    run = compiled(function, fullgraph=True)
    for rows in ROWS:
        wanted, made = call(name, rows).poison(0), call(name, rows).poison(0)
        read = function(wanted.inputs, wanted.outs, wanted.scratch)
        assert same(run(made.inputs, made.outs, made.scratch), read)
        assert same(list(made.written()), list(wanted.written()))


# -- m1 ----------------------------------------------------------------------------------------------------


def test_outs_of_a_lease_are_equal_to_eager() -> None:
    """m1: the lease's tensors are declared mutated, and are what the compiled code wrote; nothing else moves."""
    ws = workspace.create("event_fenced", device="cuda")

    def function(first: Any, second: float, y: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        ops.rms_norm(*first, out=y)
        ops.swiglu(y, second, out=act)
        return act.float() * 2

    run = compiled(function, fullgraph=True)
    found = []
    for rows in ROWS:
        norm, gate = call("rms_norm", rows, width=4096), call("swiglu", rows, inner=2048)
        y, act = norm.outs[0], gate.outs[0]
        layout = workspace.Layout("m1", y=like(y), act=like(act))
        wanted = function(norm.inputs, 7.0, y, act)
        with torch.no_grad(), ws.lease(layout) as lease:
            lease.y.view(torch.uint8).fill_(0xFF), lease.act.view(torch.uint8).fill_(0xFF)
            found.append(run(norm.inputs, 7.0, lease.y, lease.act))
            assert same([lease.y, lease.act, found[-1]], [y, act, wanted])
    assert found[0].shape != found[1].shape


def like(one: torch.Tensor) -> Any:
    return workspace.spec(*one.shape, dtype=one.dtype)


def test_an_op_that_returns_a_view_of_its_argument_is_refused() -> None:
    """m1: torch refuses such an op at its call; one that torch lets through, leasecheck finds."""

    @torch.library.custom_op("dsv4_test::returns_its_out", mutates_args=("out",))
    def returns_its_out(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.mul(x, 2, out=out)
        return out[:2]

    x, out = torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    with pytest.raises(RuntimeError, match="may not alias|must not also be"):
        returns_its_out(x, out)
    with torch.library._scoped_library("dsv4_test_plain", "FRAGMENT") as library:
        library.define("returns_its_out(Tensor x, Tensor(a!) out) -> Tensor")
        library.impl("returns_its_out", lambda x, out: torch.mul(x, 2, out=out)[:2], "CompositeExplicitAutograd")
        with pytest.raises(LeaseCheckError, match="over the bytes of 'out'"):
            leasecheck(torch.ops.dsv4_test_plain.returns_its_out.default, (x, out))


# -- m3 ----------------------------------------------------------------------------------------------------


class Shared:
    """A cache that one op writes in place and another reads, and scratch that both attentions use."""

    def __init__(self, rows: int) -> None:
        how = {"extra": 0, "splits": 2, "states": 2 * rows + 64}
        self.first = call("sparse_attention_decode", rows, full=True, **how)
        self.second = call("sparse_attention_decode", rows, seed=1, full=True, **how)
        inserted = call("q_norm_rope_kv_insert", rows, seed=2)
        inputs = list(inserted.inputs)
        inputs[2] = self.first.inputs[1]
        self.insert = Call(inserted.op, tuple(inputs), inserted.outs)
        for one in (self.first, self.second, self.insert):
            one.poison(0)

    def arguments(self) -> tuple[Any, ...]:
        both = self.first.inputs, self.first.outs, self.second.inputs, self.second.outs
        return self.insert.inputs, self.insert.outs, *both, self.first.scratch

    def written(self) -> list[torch.Tensor]:
        return [*self.insert.written(), *self.first.outs, *self.second.outs]


def in_a_row(insert: Any, q: Any, first: Any, one: Any, second: Any, two: Any, scratch: Any) -> torch.Tensor:
    ops.q_norm_rope_kv_insert(*insert, out=q)
    ops.sparse_attention_decode(*first, out=one, scratch=scratch)
    ops.sparse_attention_decode(*second, out=two, scratch=scratch)
    return one[0].float() + two[0].float()


def test_ops_that_share_scratch_in_one_graph() -> None:
    """m3: nothing is reordered across the cache that is written in place, nor across the scratch."""
    run = compiled(in_a_row, fullgraph=True)
    for rows in ROWS:
        wanted, made = Shared(rows), Shared(rows)
        read = in_a_row(*wanted.arguments())
        assert same([run(*made.arguments())], [read])
        assert same(made.written(), wanted.written())


def equal_on_two_streams(rows: int, joined: bool, delay: int) -> bool:
    """Whether compiled parts on a side stream and beside it, between a fork and its join, write what eager ones do."""
    insert = compiled(lambda inputs, q: ops.q_norm_rope_kv_insert(*inputs, out=q))
    attend = compiled(lambda inputs, out, scratch: ops.sparse_attention_decode(*inputs, out=out, scratch=scratch))
    ws = workspace.create("event_fenced", device="cuda")
    side = ws.stream("side")
    wanted, made, warm = Shared(rows), Shared(rows), Shared(rows)
    in_a_row(*wanted.arguments())
    insert(warm.insert.inputs, warm.insert.outs)
    attend(warm.first.inputs, warm.first.outs, warm.first.scratch)
    warm.first.inputs[1].zero_()
    torch.cuda.synchronize()
    with torch.no_grad(), ws.on(ws.stream("main")), nullcontext() if joined else removed("join"):
        insert(made.insert.inputs, made.insert.outs)
        with ws.fork(side) as branch, branch(side):
            torch.cuda._sleep(delay)
            attend(made.first.inputs, made.first.outs, made.first.scratch)
        attend(made.second.inputs, made.second.outs, made.first.scratch)
        made.first.inputs[1].zero_()
    torch.cuda.synchronize()
    written, right = ([*one.insert.outs, *one.first.outs, *one.second.outs] for one in (made, wanted))
    return same(written, right)


@pytest.mark.parametrize("rows", ROWS)
def test_ops_that_share_scratch_on_two_streams(rows: int) -> None:
    """m3, whatever the streams' timing."""
    assert equal_on_two_streams(rows, True, DELAY)


def test_without_the_join_they_are_caught() -> None:
    """Control: scratch and cache are written before the side stream has read them, once its delay is long enough."""
    assert not all(equal_on_two_streams(ROWS[0], False, DELAY * longer) for longer in (1, 10, 50))
