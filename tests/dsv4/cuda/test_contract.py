"""What every kernel promises besides its numbers: bits, streams, captures, memory, registration, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.kernels.calls import call
from benchmarks.kernels.maker import Call
from dsv4.ops import OpError, kernels
from tests.dsv4.cuda.check import give, same_bits
from tests.dsv4.cuda.families import FAMILIES
from tests.dsv4.ops.samples import OPS
from workspace.testing import leasecheck

NAMES = sorted(FAMILIES)
DELAY = 20_000_000
"""Cycles of a delay kernel: longer than the host needs to enqueue a call."""


def results(made: Call) -> list[torch.Tensor]:
    return [one.clone() for one in made.written()]


def test_every_kernel_has_a_call() -> None:
    """A new kernel comes with one, and has both faces; what has the fast one only has tests of its own."""
    fast_only = {"routed_experts", "combine_experts", "combine_indices"}
    assert set(NAMES) == kernels.NAMES == set(kernels.FAST) - fast_only


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_from_run_to_run_and_from_face_to_face(name: str) -> None:
    """Whatever the outs held before."""
    first, second, third = (call(name, 61).poison(byte) for byte in (0xFF, 0, 0x33))
    first.run(), second.run(), third.dispatch()
    for one, other, dispatched in zip(first.written(), second.written(), third.written(), strict=True):
        assert same_bits(one, other)
        assert same_bits(one, dispatched)


@pytest.mark.parametrize("name", NAMES)
def test_the_out_form_allocates_nothing(name: str) -> None:
    """By the allocator's own count; the returning form shows that it counts."""
    made = call(name, 17)
    made.run()
    for run, allocates in (
        (made.run, False),
        (made.dispatch, False),
        (made.outs[0].clone if made.outs else None, True),
    ):
        if run is None:
            continue
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        kept = run()
        assert (torch.cuda.memory_stats()["allocation.all.allocated"] > before) is allocates
        del kept


@pytest.mark.parametrize("name", [name for name in NAMES if OPS[name].outs])
def test_the_returning_form_runs_the_same_kernel(name: str) -> None:
    """And allocates its outs and scratch, no more."""
    wanted, made = call(name, 17).poison(0), call(name, 17)
    wanted.run()
    for _ in range(2):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        found = made.op.returning(*made.inputs, **made.untold)
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert allocated == sum(one.numel() > 0 for one in (*made.outs, *made.scratch))
    outs = zip(made.op.outs.values(), found if isinstance(found, tuple) else (found,), wanted.outs, strict=True)
    assert all(argument.partly or same_bits(one, other) for argument, one, other in outs)


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_replays_the_same(name: str) -> None:
    """Captured on a side stream, through either face."""
    wanted = call(name, 17)
    wanted.poison(0).run()
    for face in ("run", "dispatch"):
        made = call(name, 17).poison(0)
        getattr(made.copy(), face)()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            getattr(made, face)()
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(made.written(), wanted.written(), strict=True):
            assert same_bits(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_the_callers_stream_is_used(name: str) -> None:
    """Behind a delay on a side stream, which first makes the input; on another stream it would read the old one."""
    wanted, late = call(name, 17).poison(0), call(name, 17, seed=5).poison(0)
    wanted.run()
    torch.cuda.synchronize()
    for face in ("run", "dispatch"):
        made = late.copy()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(DELAY)
            give(made, call(name, 17))
            getattr(made, face)()
        side.synchronize()
        for one, other in zip(made.written(), wanted.written(), strict=True):
            assert same_bits(one, other)


def test_a_kernel_waits_for_the_one_before() -> None:
    """Launches overlap: what a long kernel writes last is read at once by a short one.

    Fails without the wait in `await_predecessor` (csrc/dsv4/launch.cuh).
    """
    first = call("rms_norm", 8192)
    first.run()
    wanted = torch.empty_like(first.outs[0][-64:])
    op, (_, weight, eps) = first.op, first.inputs
    torch.cuda.synchronize()
    op(first.outs[0][-64:], weight, eps, out=wanted)
    for _ in range(20):
        first.poison(0)
        found = torch.empty_like(wanted)
        torch.cuda.synchronize()
        first.run()
        op(first.outs[0][-64:], weight, eps, out=found)
        assert same_bits(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_launch_nothing(name: str) -> None:
    """A step may have none of decode, or none of prefill; what it mutates stays."""
    made = call(name, 0)
    before = results(made)
    made.run(), made.dispatch()
    torch.cuda.synchronize()
    for one, other in zip(made.written(), before, strict=True):
        assert same_bits(one, other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", NAMES)
def test_another_device_than_the_current_one(name: str) -> None:
    """The launch goes to the tensors' device, and the current one stays."""
    with torch.cuda.device(1):  # which torch's own ldexp needs
        made = call(name, 17, device="cuda:1").poison(0)
        torch.cuda.synchronize()
    wanted = call(name, 17).poison(0)
    wanted.run()
    for face in ("run", "dispatch"):
        getattr(made, face)()
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    for one, other in zip(made.written(), wanted.written(), strict=True):
        assert same_bits(one.cpu(), other.cpu())


@pytest.mark.parametrize("name", NAMES)
def test_the_registration_passes_opcheck(name: str) -> None:
    """Schema, autograd registration, fake tensors, AOT dispatch with dynamic shapes."""
    made = call(name, 5).poison(0)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(one, torch.Tensor) and one.dtype is torch.float8_e4m3fn for one in (*made.inputs, *made.outs)):
        checks.remove("test_schema")  # it compares with torch.allclose, which has no FP8 kernel
    torch.library.opcheck(made.op.overload, (*made.inputs, *made.outs, *made.scratch), test_utils=checks)


@pytest.mark.parametrize("name", NAMES)
def test_the_op_keeps_the_rules_of_leases(name: str) -> None:
    """Nothing outside its arguments is touched, every out is written, nothing is kept."""
    made = call(name, 5)
    schema = made.op.overload._schema.arguments
    mutated = {one.name for one in schema if one.alias_info}
    partial = mutated - set(made.op.outs) - set(made.op.scratch)
    partial |= {key for key, one in made.op.outs.items() if one.partly}
    leasecheck(
        made.op.overload, (*made.inputs, *made.outs, *made.scratch), partial=partial, scratch=set(made.op.scratch)
    )


@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_does_the_same(name: str) -> None:
    """Two shapes through torch.compile."""
    op = call(name, 1).op

    @torch.compile(backend="aot_eager", dynamic=True)
    def compiled(inputs: Any, outs: Any, scratch: Any) -> None:
        op(*inputs, out=outs or None, scratch=scratch or None)

    for rows in (6, 19):
        wanted, made = call(name, rows).poison(0), call(name, rows).poison(0)
        wanted.run()
        compiled(made.inputs, made.outs, made.scratch)
        for one, other in zip(made.written(), wanted.written(), strict=True):
            assert same_bits(one, other)


def replaced(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


REFUSED: dict[str, Callable[[Call], Call]] = {
    "shape": lambda c: Call(c.op, replaced(c.inputs, 0, c.inputs[0][..., :-8].contiguous()), c.outs),
    "rank": lambda c: Call(c.op, replaced(c.inputs, 0, c.inputs[0].flatten()), c.outs),
    "dtype": lambda c: Call(c.op, replaced(c.inputs, 0, c.inputs[0].half()), c.outs),
    "contiguous": lambda c: Call(c.op, replaced(c.inputs, 0, c.inputs[0].repeat_interleave(2, -1)[..., ::2]), c.outs),
    "unaligned": lambda c: Call(c.op, replaced(c.inputs, 0, shifted(c.inputs[0])), c.outs),
    "shares bytes": lambda c: Call(c.op, c.inputs, (c.inputs[0], *c.outs[1:])),
}


def shifted(one: torch.Tensor) -> torch.Tensor:
    """The same values 2 bytes further on."""
    room = torch.empty(one.numel() + 1, dtype=one.dtype, device=one.device)
    return room[1:].view(one.shape).copy_(one)


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused_before_the_launch(what: str) -> None:
    """A typed error that names the argument; outs keep what they held."""
    made = REFUSED[what](call("rms_norm", 9).poison(0x11))
    with pytest.raises(OpError, match="of rms_norm"):
        made.run()
    torch.cuda.synchronize()
    assert all((one.view(torch.uint8) == 0x11).all() for one in made.outs) or what == "shares bytes"


def test_tensors_of_two_devices_are_refused() -> None:
    """One on the CPU, through either face; nothing is left for the next kernel to report."""
    made = call("rms_norm", 9)
    mixed = Call(made.op, replaced(made.inputs, 1, made.inputs[1].cpu()), made.outs)
    with pytest.raises(OpError, match="cpu"):
        mixed.run()
    for argument in (0, 1):
        mixed = Call(made.op, replaced(made.inputs, argument, made.inputs[argument].cpu()), made.outs)
        with pytest.raises(RuntimeError, match="another device"):
            mixed.dispatch()
        torch.ones(4, device="cuda").add_(1)
