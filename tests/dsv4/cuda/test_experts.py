"""The routed experts on a GPU: a few rows by kernels, more by a grouped GEMM, neither asking the device anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.kernels.maker import Call, Maker, made
from dsv4 import ops
from dsv4.ops import kernels
from dsv4.ops.errors import OpError
from tests.dsv4.cuda.check import _check_near, same_bits

HIDDEN, INNER, EXPERTS = 512, 256, 8
FEW = (1, 2, 10)
MANY = (11, 64, 1023)


def routed(rows: int, seed: int = 0, k: int = 6, elsewhere: bool = False, device: str = "cuda") -> Call:
    """Rows sent to `k` distinct experts each; some of them another rank's."""
    m = Maker(device, seed, "random")
    experts = m.plain(rows, EXPERTS).argsort(1)[:, :k].to(torch.int32).contiguous()
    if elsewhere:
        experts.masked_fill_(experts > EXPERTS // 2, -1)
    weights = m.plain(rows, k).softmax(1)
    w13 = m.plain(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16).mul_(HIDDEN**-0.5)
    w2 = m.plain(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16).mul_(INNER**-0.5)
    return made(ops.routed_experts, (m.noise(rows, HIDDEN), experts, weights, w13, w2, 2.0))


def expected(call: Call) -> torch.Tensor:
    """In float64, each expert's share summed in the order of the lists."""
    x, experts, weights, w13, w2, limit = call.inputs
    x, w13, w2 = x.double(), w13.double(), w2.double()
    gate, up = torch.einsum("th,eih->tei", x, w13).chunk(2, 2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    every = torch.einsum("tei,ehi->teh", gate * gate.sigmoid() * up, w2)
    own = every.gather(1, experts.clamp(min=0).long()[..., None].expand(-1, -1, HIDDEN))
    return (own * weights.double().masked_fill(experts < 0, 0)[..., None]).sum(1)


@pytest.mark.parametrize("elsewhere", (False, True))
@pytest.mark.parametrize("rows", (*FEW, *MANY))
def test_numbers(rows: int, elsewhere: bool) -> None:
    call = routed(rows, elsewhere=elsewhere).poison(0xFF)
    (found,) = call.run()
    _check_near("y of routed_experts", found, expected(call), 2e-2, 1e-2)


@pytest.mark.parametrize("rows", (*FEW, *MANY))
def test_same_bits_from_run_to_run_and_from_face_to_face(rows: int) -> None:
    first, second, third = (routed(rows).poison(byte) for byte in (0xFF, 0, 0x33))
    first.run(), second.run(), third.dispatch()
    assert same_bits(first.outs[0], second.outs[0])
    assert same_bits(first.outs[0], third.outs[0])


@pytest.mark.parametrize("rows", (*FEW, *MANY))
def test_a_capture_replays_what_later_rows_choose(rows: int) -> None:
    """The lists that are read are those of the replay; a question to the host would break the capture."""
    captured, wanted = routed(rows), routed(rows, seed=1)
    captured.copy().run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    for one, other in zip(captured.inputs[:5], wanted.inputs[:5], strict=True):
        one.copy_(other)
    captured.poison(0xFF)
    graph.replay()
    wanted.run()
    torch.cuda.synchronize()
    assert same_bits(captured.outs[0], wanted.outs[0])


def test_few_rows_allocate_nothing() -> None:
    call = routed(FEW[-1])
    call.run()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call.run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_kernels_leave_more_rows_alone() -> None:
    """The fast face says that the call is not its own."""
    call = routed(MANY[0])
    arguments: tuple[Any, ...] = (*call.inputs, *call.outs, *call.scratch)
    assert kernels.FAST["routed_experts"](*arguments) is False


@pytest.mark.parametrize("rows", (FEW[0], MANY[0]))
def test_no_experts_are_refused(rows: int) -> None:
    """Nothing would write y."""
    call = routed(rows, k=0)
    with pytest.raises(OpError, match="has 0 columns"):
        ops.routed_experts(*call.inputs)
    with pytest.raises(OpError, match="has 0 columns"):
        ops.routed_experts(*call.inputs, out=call.outs[0])
