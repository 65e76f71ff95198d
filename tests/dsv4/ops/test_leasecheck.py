"""Every op keeps the rules of leases; an op that breaks one is caught, rule by rule."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.dsv4.ops.samples import OPS, ints, outs, sample
from workspace.testing import leasecheck

Fault = Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]
"""Of an argument and the op's first mutated one. Called before the kernel; what it returns, after it."""

KEPT: list[torch.Tensor] = []

OTHERWISE = {
    "sparse_attention_decode": {"extra_cache": None, "extra_slots": None, "extra_lens": None},
    "combine_indices": {"chosen": torch.tensor([[0, 2, 4, -1]]).repeat(7, 1).int()},
    "route": {"bias": None, "table": torch.arange(24).view(8, 3) % 8, "tokens": torch.arange(7)},
    "indexer_top_k": {"counts": ints(0, 0, 0, 0, 0, 0, 0)},
}
"""The other case of optional arguments, and rows without a candidate."""


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """A view that is kept makes leasecheck collect garbage: what was there before need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def arguments(name: str, **changed: Any) -> tuple[list[Any], dict[str, list[str]]]:
    """Arguments of the out form, and which of them are states and which scratch."""
    op, inputs = OPS[name], list(sample(name, changed.pop("dtype", torch.float32)))
    for key, value in changed.items():
        inputs[op._scalars.index(key)] = value
    made, scratch = outs(name, tuple(inputs))
    states = [one.name for one in op.overload._schema.arguments[: len(inputs)] if one.alias_info]
    states += [key for key, one in op.outs.items() if one.partly]
    return [*inputs, *made, *scratch], {"partial": states, "scratch": list(op.scratch)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(OPS))
def test_the_out_form_keeps_the_rules(name: str, dtype: torch.dtype) -> None:
    """In its layout's bytes, between guard bands: outs whole, inputs intact, scratch written first, nothing kept."""
    given, kinds = arguments(name, dtype=dtype)
    assert leasecheck(OPS[name].overload, given, **kinds) == []


@pytest.mark.parametrize("name", sorted(OTHERWISE))
def test_optional_arguments_change_nothing_about_it(name: str) -> None:
    """The other branch of the op keeps the same rules."""
    given, kinds = arguments(name, **OTHERWISE[name])
    assert leasecheck(OPS[name].overload, given, **kinds) == []


def first_byte(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)[:1]


def changes(argument: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    return lambda: first_byte(argument).bitwise_not_()


def keeps(argument: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    return lambda: KEPT.append(argument.view(-1)[:1])


def moves(argument: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    return lambda: argument.set_(argument.clone())  # type: ignore[call-overload]


def writes_behind(argument: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    end = argument.data_ptr() + argument.nbytes
    storage = torch._C._construct_storage_from_data_pointer(end, torch.device("cpu"), 2)
    behind = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (2,))  # type: ignore[call-overload]
    return lambda: behind.fill_(0)


def forgets(argument: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    before = argument.view(-1)[-1:].clone()
    return lambda: argument.view(-1)[-1:].copy_(before)


def reads(argument: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    before = first_byte(argument).clone()
    return lambda: first_byte(out).bitwise_xor_(before)


def faults(name: str) -> list[tuple[Fault, str, str]]:
    """The faults an op can have, the argument each is about, and what leasecheck says to it."""
    op, (given, kinds) = OPS[name], arguments(name)
    tensors = dict(zip((one.name for one in op.overload._schema.arguments), given, strict=True))
    mutated = [one.name for one in op.overload._schema.arguments if one.alias_info]
    first = mutated[0]
    only_read = next(key for key in op.inputs if key not in mutated and tensors[key] is not None)
    found: list[tuple[Fault, str, str]] = [
        (changes, only_read, f"changes {only_read!r}, which its schema does not declare mutated"),
        (keeps, first, f"keeps a view of {first!r}"),
        (moves, first, f"moves {first!r} to other memory or another shape"),
        (writes_behind, first, f"writes 2 bytes after {first!r}, the first at +0"),
    ]
    for out in (key for key in mutated if key not in kinds["partial"] + kinds["scratch"]):
        found.append((forgets, out, f"leaves 1 elements of {out!r} unwritten"))
    if first not in kinds["partial"]:
        found.append((reads, first, f"reads {first!r} before it writes it: 1 elements follow its old contents"))
    for key in kinds["scratch"]:
        if tensors[key].numel():
            found.append((reads, key, f"reads scratch {key!r} before it writes it"))
    return found


@pytest.fixture
def faulty() -> Iterator[Callable[[str, Fault, str], Any]]:
    """Registers an op with the schema and the kernel of one of `OPS`, and a fault of its own."""
    with torch.library._scoped_library("dsv4_faulty", "FRAGMENT") as library:

        def define(name: str, fault: Fault, about: str) -> Any:
            op = OPS[name]
            names = [one.name for one in op.overload._schema.arguments]
            mutated = next(one.name for one in op.overload._schema.arguments if one.alias_info)

            def kernel(*args: Any) -> None:
                given = dict(zip(names, args, strict=True))
                after = fault(given[about], given[mutated])
                op.reference(*args)
                after()

            registered = f"{name}_{fault.__name__}_{about}"
            library.define(str(op.overload._schema).replace(f"dsv4::{name}", registered, 1))
            library.impl(registered, kernel, "CompositeExplicitAutograd")
            return getattr(torch.ops.dsv4_faulty, registered).default

        yield define
    KEPT.clear()


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_fault_of_each_kind_is_caught(faulty: Callable[[str, Fault, str], Any], name: str) -> None:
    """The op with one fault put in is found out, and nothing else is said of it."""
    for fault, about, finding in faults(name):
        given, kinds = arguments(name)
        assert leasecheck(faulty(name, fault, about), given, raise_exception=False, **kinds) == [finding]


def test_every_kind_of_fault_is_tried() -> None:
    """An op with outs has one of each kind, and one more for each scratch tensor."""
    kinds = {fault for name in OPS for fault, _, _ in faults(name)}
    assert kinds == {changes, keeps, moves, writes_behind, forgets, reads}
    assert [about for fault, about, _ in faults("routed_experts") if fault is reads] == [
        "y", *OPS["routed_experts"].scratch
    ]  # fmt: skip
