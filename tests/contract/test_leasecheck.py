"""leasecheck tells ops that keep the rules of leases from ops that break one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from workspace.errors import ArgumentError, Unsupported
from workspace.testing import LeaseCheckError, leasecheck

Body = Callable[..., Any]
KEPT: list[torch.Tensor] = []
ARENA = torch.zeros(1024)


@pytest.fixture
def register() -> Iterator[Callable[..., Any]]:
    """Registers an op in a library of the test's own, so that PyTorch's own checks of results do not run."""
    with torch.library._scoped_library("leasecheck_test", "FRAGMENT") as library:

        def define(schema: str, body: Body) -> Any:
            name = schema.split("(")[0]
            library.define(schema)
            library.impl(name, body, "CompositeExplicitAutograd")
            return getattr(torch.ops.leasecheck_test, name).default

        yield define
    KEPT.clear()


def findings(op: Any, *args: Any, **options: Any) -> list[str]:
    """What is found, without an exception."""
    return leasecheck(op, args, raise_exception=False, **options)


def double(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 2, out=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_out_form_that_keeps_the_rules(register: Callable[..., Any], dtype: torch.dtype) -> None:
    """Every element written, nothing else touched, nothing kept."""

    def copies(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    op = register("copies(Tensor x, Tensor(a!) out) -> ()", copies)
    x = torch.arange(24).view(4, 6).to(dtype)
    assert findings(op, x, torch.empty_like(x)) == []


def test_bool_empty_and_list_arguments(register: Callable[..., Any]) -> None:
    """A bool out that is all true or all false is written; empty tensors and lists of outs have their places."""

    def split(x: torch.Tensor, outs: list[torch.Tensor]) -> None:
        for value, out in zip((True, False), outs, strict=True):
            out.fill_(value)

    op = register("split(Tensor x, Tensor(a!)[] outs) -> ()", split)
    assert findings(op, torch.empty(0), [torch.empty(3, dtype=torch.bool), torch.empty(4, dtype=torch.bool)]) == []


def test_public_ops() -> None:
    """Ops of PyTorch: an out-form may return its out, as its schema says; a view may not be returned."""
    x, y = torch.ones(8), torch.ones(8)
    assert leasecheck(torch.ops.aten.add.out, (x, y), {"out": torch.empty(8)}) == []
    assert leasecheck(torch.ops.aten.add.Tensor, (x, y)) == []
    assert leasecheck(torch.ops.aten.rand.default, ((8,),)) == []
    with pytest.raises(LeaseCheckError, match="'result' over the bytes of 'self': it outlives the lease"):
        leasecheck(torch.ops.aten.view.default, (x, [2, 4]))


def test_custom_op() -> None:
    """Ops of torch.library.custom_op, given as such, as packet and as overload."""

    @torch.library.custom_op("leasecheck_test::doubled", mutates_args=("out",))
    def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
        double(x, out)

    packet = torch.ops.leasecheck_test.doubled
    for op in (doubled, packet, packet.default):
        assert leasecheck(op, (torch.ones(5), torch.empty(5))) == []


def returns_its_out(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    double(x, out)
    return out[:2]


def returns_its_scratch(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2, out=scratch)


def keeps_its_out(x: torch.Tensor, out: torch.Tensor) -> None:
    double(x, out)
    KEPT.append(out[1:])


def writes_behind(x: torch.Tensor, out: torch.Tensor) -> None:
    double(x, out)
    behind = out.data_ptr() + 4 * out.numel() + 4
    storage = torch._C._construct_storage_from_data_pointer(behind, torch.device("cpu"), 4)
    torch.empty(0).set_(storage, 0, (1,)).fill_(0.0)  # type: ignore[call-overload]


def writes_before(x: torch.Tensor, out: torch.Tensor) -> None:
    double(x, out)
    storage = torch._C._construct_storage_from_data_pointer(out.data_ptr() - 4, torch.device("cpu"), 4)
    torch.empty(0).set_(storage, 0, (1,)).fill_(0.0)  # type: ignore[call-overload]


def forgets_the_last_row(x: torch.Tensor, out: torch.Tensor) -> None:
    double(x[:-1], out[:-1])


def accumulates(x: torch.Tensor, out: torch.Tensor) -> None:
    out.nan_to_num_().add_(x)


def scales_its_input(x: torch.Tensor, out: torch.Tensor) -> None:
    double(x.mul_(3), out)


def reallocates_its_out(x: torch.Tensor, out: torch.Tensor) -> None:
    double(x, out)
    out.set_(x.clone())  # type: ignore[call-overload]


def returns_an_arena(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2, out=ARENA[: x.numel()].view(x.shape))


def returns_an_arena_once(x: torch.Tensor) -> torch.Tensor:
    """Alternates between a view and a copy, so that two results never overlap."""
    if KEPT:
        ARENA.fill_(7)
        return x * 2
    KEPT.append(x.clone())
    return returns_an_arena(x)


BAD = [
    ("(Tensor x, Tensor(a!) out) -> Tensor", returns_its_out, "returns 'result' over the bytes of 'out'"),
    ("(Tensor x, Tensor(a!) scratch) -> Tensor", returns_its_scratch, "returns 'result' over the bytes of 'scratch'"),
    ("(Tensor x, Tensor(a!) out) -> ()", keeps_its_out, "keeps a view of 'out'"),
    ("(Tensor x, Tensor(a!) out) -> ()", writes_behind, "writes 4 bytes after 'out', the first at +4"),
    ("(Tensor x, Tensor(a!) out) -> ()", writes_before, "writes 4 bytes before 'out', the first at -4"),
    ("(Tensor x, Tensor(a!) out) -> ()", forgets_the_last_row, "leaves 3 elements of 'out' unwritten"),
    ("(Tensor x, Tensor(a!) out) -> ()", accumulates, "reads 'out' before it writes it"),
    ("(Tensor x, Tensor(a!) out) -> ()", scales_its_input, "changes 'x', which its schema does not declare mutated"),
    ("(Tensor x, Tensor(a!) out) -> ()", reallocates_its_out, "moves 'out' to other memory"),
    ("(Tensor x) -> Tensor", returns_an_arena, "returns memory of its own arena: a second call returns the same bytes"),
    ("(Tensor x) -> Tensor", returns_an_arena_once, "a second call changes what the first returned"),
]


@pytest.mark.parametrize(("signature", "body", "finding"), BAD, ids=[body.__name__ for _, body, _ in BAD])
def test_op_that_breaks_a_rule(register: Callable[..., Any], signature: str, body: Body, finding: str) -> None:
    """Each rule broken by one op, which is named with the argument."""
    op = register(body.__name__ + signature, body)
    args = [torch.arange(1.0, 13).view(4, 3)]
    if "(a!)" in signature:
        args.append(torch.empty(4, 3))
    with pytest.raises(LeaseCheckError) as caught:
        leasecheck(op, args)
    assert any(finding in found for found in caught.value.findings), caught.value
    assert body.__name__ in str(caught.value)


def test_partial_arguments(register: Callable[..., Any]) -> None:
    """State and scratch need not be written in full, and may be read; an out of the same op must be."""

    def step(x: torch.Tensor, state: torch.Tensor, out: torch.Tensor) -> None:
        state[:1].add_(x[:1])
        torch.add(x, state, out=out)

    op = register("step(Tensor x, Tensor(a!) state, Tensor(b!) out) -> ()", step)
    args = torch.ones(4), torch.zeros(4), torch.empty(4)
    assert findings(op, *args, partial=("state",)) == []
    assert any("'state'" in found for found in findings(op, *args))
    with pytest.raises(Unsupported, match="does not declare x mutated"):
        findings(op, *args, partial=("x",))


def test_scratch_arguments(register: Callable[..., Any]) -> None:
    """Scratch need not be written in full; what it held may not show in an out, a state or a result."""

    def careful(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        out.copy_(scratch[: len(x)].copy_(x).mul_(2))

    def careless(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, used: torch.Tensor) -> None:
        torch.add(x, used.view(torch.uint8).sum(), out=out)

    def remembers(x: torch.Tensor, state: torch.Tensor, scratch: torch.Tensor) -> None:
        state.copy_(scratch[: len(x)].isnan())

    def returns(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        return scratch.isnan()

    x, wide = torch.ones(4), torch.empty(9)
    op = register("careful(Tensor x, Tensor(a!) out, Tensor(b!) scratch) -> ()", careful)
    assert findings(op, x, torch.empty(4), wide, scratch=("scratch",)) == []
    op = register("careless(Tensor x, Tensor(a!) out, Tensor(b!) scratch, Tensor(c!) used) -> ()", careless)
    found = findings(op, x, torch.empty(4), wide, wide, scratch=("scratch", "used"))
    assert found == ["reads scratch 'used' before it writes it"]
    op = register("remembers(Tensor x, Tensor(a!) state, Tensor(b!) scratch) -> ()", remembers)
    found = findings(op, x, torch.zeros(4), wide, partial=("state",), scratch=("scratch",))
    assert found == ["reads scratch 'scratch' before it writes it"]
    op = register("returns(Tensor x, Tensor(a!) scratch) -> Tensor", returns)
    assert findings(op, x, wide, scratch=("scratch",)) == ["reads scratch 'scratch' before it writes it"]
    with pytest.raises(Unsupported, match="does not declare x mutated"):
        findings(op, x, wide, scratch=("x",))


def test_opcheck_does_not_notice_the_arena(register: Callable[..., Any]) -> None:
    """PyTorch's own schema test passes an op whose result lies in an arena: leasecheck is what finds it."""
    op = register("arena(Tensor x) -> Tensor", returns_an_arena)
    torch.library.opcheck(op, (torch.ones(8),), test_utils="test_schema")
    assert findings(op, torch.ones(8))


def test_callable_without_schema() -> None:
    """Nothing says what a plain function mutates: refused, with the remedy."""
    with pytest.raises(Unsupported, match="custom_op"):
        leasecheck(double, (torch.ones(3), torch.empty(3)))


def test_arguments_beyond_the_schema() -> None:
    """They are refused, as the op would: what is not looked at is not passed over."""
    with pytest.raises(ArgumentError, match="given 2 arguments"):
        leasecheck(torch.ops.aten.relu.default, (torch.ones(3), torch.ones(3)))


def test_caller_keeps_its_tensors(register: Callable[..., Any]) -> None:
    """The tensors passed in are copied: not written, not kept."""
    op = register("plain(Tensor x, Tensor(a!) out) -> ()", double)
    x, out = torch.ones(4, requires_grad=True), torch.full((4,), 9.0)
    assert leasecheck(op, (x, out)) == []
    assert out.tolist() == [9.0] * 4
