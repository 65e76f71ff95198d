"""Deferred operators compute, bit for bit, what they compute at once."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from workspace import simulated
from workspace.errors import DriverError


def deferred(seed: int = 0, **settings: object) -> simulated.Device:
    return simulated.Device(memory="host", execution="deferred", seed=seed, **settings)  # type: ignore[arg-type]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.stride() == right.stride() and torch.equal(left, right)


@pytest.fixture
def held() -> simulated.Device:
    """A device that runs nothing before somebody synchronises."""
    return deferred(schedule=simulated.InOrder())


def mixed(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    y = torch.relu(x @ w)
    z = y.view(2, 4, -1).transpose(1, 2).contiguous()
    z.add_(1)
    out = torch.empty(0)
    torch.add(y, y, out=out)
    values, indices = torch.sort(y, dim=-1)
    picked = y[y > 0.5]
    noise = torch.randn(3, 3) + torch.nn.functional.dropout(y, 0.3)[:3, :3]
    scale = torch.tensor([1.0, 2.0, 3.0]) * y.sum().item()
    return [y, z, out, values, indices, picked, torch.unique(picked.round()), noise, scale, *y.split(3)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inference", [False, True])
def test_a_program_computes_what_it_computes_eagerly(seed: int, dtype: torch.dtype, inference: bool) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(8, 16, dtype=dtype), torch.randn(16, 16, dtype=dtype)
    device = deferred(seed)
    with torch.inference_mode(inference):
        torch.manual_seed(1)
        expected = mixed(x, w)
        torch.manual_seed(1)
        with device:
            found = mixed(x, w)
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))
    assert device.verdict() == "SAFE"


def test_nothing_runs_before_somebody_synchronises(held: simulated.Device) -> None:
    x = torch.zeros(4)
    with held:
        x.add_(1)
        assert held.queue.executed == 0
        held.synchronize()
        assert held.queue.executed == 1
    assert x.tolist() == [1, 1, 1, 1]


def test_results_are_poisoned_until_their_operator_ran(held: simulated.Device) -> None:
    with held:
        y = torch.ones(4) + 1
        seen = []
        for nodes in (3, 4):  # poison, ones, poison; then the addition
            held.drain(until=partial(has_run, held, nodes))
            seen.append(peek(y))
    assert all(math.isnan(value) for value in seen[0])
    assert seen[1] == [2, 2, 2, 2]


def has_run(device: simulated.Device, nodes: int) -> bool:
    return device.queue.executed >= nodes


def peek(tensor: torch.Tensor) -> list[float]:
    """The bytes as they are now, whatever is pending."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.tolist()


def test_memory_that_was_freed_is_handed_out_again_while_its_reader_is_pending(held: simulated.Device) -> None:
    """The queue pins nothing: on one stream this is safe, because order protects the reader."""
    with held:
        a = torch.ones(1000)
        first = held.executor.aliases.of(a).spans
        total = a.sum()
        del a
        b = torch.zeros(1000)
        assert held.executor.aliases.of(b).spans == first
    assert total.item() == 1000 and b.sum().item() == 0


def test_use_after_free_across_streams_corrupts_and_is_reported() -> None:
    """Without record_stream a block goes back to its own stream while another still reads it (pytorch#6962 and kin)."""

    def program(device: simulated.Device, record: bool) -> torch.Tensor:
        side, made = device.new_stream("side"), device.new_event()
        a = torch.ones(1000)
        device.record(made)
        device.wait(made, side)
        with device.on(side):
            total = a.sum()
        if record:
            device.record_stream(a, side)
        del a
        torch.zeros(1000)
        device.synchronize()
        return total

    for record in (False, True):
        totals = set()
        for schedule in (simulated.StreamFirst(0), simulated.StreamFirst(1)):
            device = deferred(schedule=schedule)
            with device:
                totals.add(program(device, record).item())
            assert device.verdict() == ("SAFE" if record else "UNSAFE")
        assert (totals == {1000.0}) == record


def test_gradients_are_those_of_eager_execution() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    x = torch.randn(5, 8)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with deferred():
        found = gradients()
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))


def test_an_error_appears_late_names_its_call_and_is_sticky() -> None:
    device = deferred(schedule=simulated.InOrder(), sites=True)
    with pytest.raises(DriverError) as raised, device:
        table, index = torch.zeros(4, 2), torch.tensor([7])
        torch.nn.functional.embedding(index, table)  # the call that the note names
        torch.ones(3)
        device.synchronize()
    cause = raised.value.__cause__
    assert isinstance(cause, IndexError)
    assert any("test_executor.py" in note and "embedding" in note for note in cause.__notes__)
    with pytest.raises(DriverError), device:
        torch.ones(3)


def test_a_wrong_shape_is_refused_at_the_call() -> None:
    """Shapes are checked by the host, on CUDA too; the device stays usable."""
    device = deferred()
    with device:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            torch.zeros(2, 3) @ torch.zeros(4, 5)
        with pytest.raises(RuntimeError, match="broadcast|size of tensor"):
            torch.zeros(2).add_(torch.zeros(3))
        total = torch.ones(2).sum()
    assert total.item() == 2 and device.verdict() == "SAFE"


def test_an_operator_without_a_shape_path_makes_the_verdict_unknown() -> None:
    with torch.library._scoped_library("executor_test", "FRAGMENT") as library:
        library.define("halves(Tensor x) -> Tensor")

        def halves(x: torch.Tensor) -> torch.Tensor:
            if not bool(x.any()):
                raise ValueError("zeros cannot be halved")
            return x / 2

        library.impl("halves", halves, "CPU")
        device = deferred()
        with device:
            y = torch.ops.executor_test.halves(torch.ones(2))
        assert y.tolist() == [0.5, 0.5]
        assert device.verdict() == "UNKNOWN"


def test_a_fake_kernel_that_lies_is_an_error() -> None:
    with torch.library._scoped_library("executor_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.cat([x, x]), "CPU")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        with pytest.raises(DriverError, match="fake kernel"), deferred() as device:
            torch.ops.executor_test.twice(torch.ones(2))
            device.synchronize()


def test_sparse_tensors_are_not_modelled_and_said_so() -> None:
    device = deferred()
    with device:
        y = torch.eye(3).to_sparse().to_dense()
    assert torch.equal(y, torch.eye(3)) and device.verdict() == "UNKNOWN"
