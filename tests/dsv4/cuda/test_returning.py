"""The returning form in one call of C: what it returns are PyTorch's own tensors, and nothing of a call is kept."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernels.calls import call
from benchmarks.kernels.maker import Call
from dsv4.ops import OpError
from tests.dsv4.cuda.check import give, same_bits
from tests.dsv4.cuda.families import FAMILIES
from tests.dsv4.ops.samples import OPS

NAMES = [name for name in sorted(FAMILIES) if OPS[name].outs]
SEVERAL = ["mhc_post_pre", "indexer_q_rope_fp4", "sparse_attention_decode", "rms_norm"]
"""Four outs, three, one with scratch, one."""
DELAY = 20_000_000
"""Cycles of a delay kernel: longer than the host needs to enqueue a call."""


def listed(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def returned(made: Call) -> tuple[torch.Tensor, ...]:
    return listed(made.op.returning(*made.inputs, **made.untold))


def right(name: str, rows: int) -> tuple[torch.Tensor, ...]:
    """What the out form writes."""
    made = call(name, rows).poison(0)
    made.run()
    return made.outs


def agree(name: str, found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    three = zip(OPS[name].outs.values(), found, wanted, strict=True)
    return all(argument.partly or same_bits(one, other) for argument, one, other in three)


@pytest.mark.parametrize("name", NAMES)
def test_the_call_is_one_of_c(name: str) -> None:
    """At sizes that are new and at sizes that are known; with the bits, sizes, strides and dtypes of the out form."""
    for rows in (17, 5, 17, 1):
        made, wanted = call(name, rows), right(name, rows)
        for _ in range(2):
            found = made.op._returned(made.inputs, made.untold)
            assert found is not None
            kinds = [[(one.shape, one.stride(), one.dtype) for one in each] for each in (listed(found), wanted)]
            assert kinds[0] == kinds[1]
        assert agree(name, listed(found), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_of_what_is_returned_is_written(name: str) -> None:
    """The memory that the allocator hands out again was poisoned."""
    wanted, made = right(name, 17), call(name, 17)
    for byte in (0xFF, 0x33):
        held = [one for _ in range(8) for one in returned(made)]
        for one in held:
            one.view(torch.uint8).fill_(byte)
        places = {one.data_ptr() for one in held}
        del held, one
        found = returned(made)
        assert places & {one.data_ptr() for one in found}
        assert agree(name, found, wanted)


@pytest.mark.parametrize("name", SEVERAL)
def test_what_is_returned_is_ordinary(name: str) -> None:
    """Storages of their own, of the allocator's, that may grow; no gradient; one reference."""
    made = call(name, 17)
    returned(made)
    found = returned(made)
    assert len({one.untyped_storage().data_ptr() for one in found}) == len(found)
    for one in found:
        assert type(one) is torch.Tensor and not one.requires_grad and not one._is_view()
        assert one.untyped_storage().nbytes() == one.nbytes and one.untyped_storage().resizable()
        assert one.device == made.inputs[0].device
    del one
    plain = tuple(torch.empty(2) for _ in found)
    assert [sys.getrefcount(one) for one in found] == [sys.getrefcount(one) for one in plain]
    with torch.inference_mode():
        assert all(one.is_inference() for one in returned(made))


def handed_out_again(through: Callable[[torch.Tensor], torch.Tensor], recorded: bool) -> bool:
    """Whether the bytes of what is returned, let go, are another's although a side stream still reads them."""
    made, side = call("rms_norm", 300), torch.cuda.Stream()
    returned(made)
    one = through(returned(made)[0])
    torch.cuda.empty_cache()
    place, size = one.data_ptr(), one.nbytes
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY)
    if recorded:
        one.record_stream(side)
    del one
    again = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return again.data_ptr() == place


def test_record_stream_holds_what_is_returned() -> None:
    """Control: without it the bytes are handed out again. Memory that came through DLPack has no record."""
    assert not handed_out_again(lambda one: one, recorded=True)
    assert handed_out_again(lambda one: one, recorded=False)
    assert handed_out_again(torch.from_dlpack, recorded=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_replays_what_is_returned(name: str) -> None:
    """Memory of the graph's own pool, written anew by each replay."""
    made, wanted = call(name, 17), right(name, 17)
    returned(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = returned(made)
    for one in found:
        one.view(torch.uint8).fill_(0xFF)
    pool = tuple(graph.pool())
    own = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == pool]
    for one in found:
        assert any(seg["address"] <= one.data_ptr() < seg["address"] + seg["total_size"] for seg in own)
    graph.replay()
    torch.cuda.synchronize()
    assert agree(name, found, wanted)


def test_memory_comes_from_the_pool_in_use() -> None:
    pool, made = torch.cuda.MemPool(), call("mhc_post_pre", 17)
    returned(made)
    with torch.cuda.use_mem_pool(pool):
        found = returned(made)
    segments = pool.snapshot()
    for one in found:
        assert any(seg["address"] <= one.data_ptr() < seg["address"] + seg["total_size"] for seg in segments)


@pytest.mark.parametrize("name", NAMES)
def test_the_callers_stream_is_used(name: str) -> None:
    """Behind a delay on a side stream that makes the inputs; memory is the side stream's, too."""
    wanted, made = right(name, 17), call(name, 17, seed=5)
    returned(made)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY)
        give(made, call(name, 17))
        found = returned(made)
        places = {one.data_ptr() for one in found}
        side.synchronize()
        assert agree(name, found, wanted)
        sizes = [one.nbytes for one in found]
        del found
    others = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    assert not places & {one.data_ptr() for one in others}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", NAMES)
def test_another_device_than_the_current_one(name: str) -> None:
    with torch.cuda.device(1):  # which torch's own ldexp needs
        made = call(name, 17, device="cuda:1")
        torch.cuda.synchronize()
    wanted = right(name, 17)
    for _ in range(2):
        found = returned(made)
        assert torch.cuda.current_device() == 0 and all(one.device.index == 1 for one in found)
    torch.cuda.synchronize(1)
    assert agree(name, tuple(one.cpu() for one in found), tuple(one.cpu() for one in wanted))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_return_empty_tensors(name: str) -> None:
    made = call(name, 0)
    for _ in range(2):
        found = returned(made)
        assert [one.shape for one in found] == [one.shape for one in made.outs]


# -- whose call it is --------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass: the dispatcher's."""


def test_modes_and_subclasses_see_the_op() -> None:
    """As do CPU tensors, whose kernel is another."""
    made = call("rms_norm", 17)
    x, *rest = made.inputs
    with Seen() as seen:
        returned(made)
    assert "dsv4.rms_norm.default" in seen.ops
    assert made.op._returned((x.as_subclass(Own), *rest), {}) is None
    assert made.op._returned((x.cpu(), *rest), {}) is None
    assert listed(made.op.returning(x.as_subclass(Own), *rest))[0].shape == made.outs[0].shape


@pytest.mark.parametrize("name", NAMES)
def test_compiled_code_does_the_same(name: str) -> None:
    """One graph, two sizes."""
    op = OPS[name]
    torch.compiler.reset()
    run = torch.compile(lambda inputs, dims: op.returning(*inputs, **dims), backend="aot_eager", fullgraph=True)
    for rows in (6, 19):
        made = call(name, rows)
        assert agree(name, listed(run(made.inputs, made.untold)), right(name, rows))
    torch.compiler.reset()


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.fixture
def still() -> Iterator[None]:
    """The allocator holds afterwards what it held before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", NAMES)
def test_a_refused_call_keeps_nothing(name: str, still: None) -> None:
    """An input that is not contiguous, at sizes that are known: refused by the kernel, after the allocation."""
    made = call(name, 17)
    returned(made)
    first = next(one for one in made.inputs if isinstance(one, torch.Tensor) and one.dim() > 1)
    counts = [sys.getrefcount(one) for one in made.inputs if isinstance(one, torch.Tensor)]
    held = torch.cuda.memory_allocated()
    strided = torch.empty_strided(first.shape, [2 * one for one in first.stride()], dtype=first.dtype, device="cuda")
    inputs = tuple(strided if one is first else one for one in made.inputs)
    for _ in range(3):
        with pytest.raises(OpError, match=f"of {name}"):
            made.op.returning(*inputs, **made.untold)
    del inputs, strided
    assert torch.cuda.memory_allocated() == held
    assert counts == [sys.getrefcount(one) for one in made.inputs if isinstance(one, torch.Tensor)]


def test_no_memory_is_torchs_own_error(still: None) -> None:
    """At sizes that are known; the next call has memory again."""
    made = call("mhc_post_pre", 8192)
    wanted = returned(made)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            returned(made)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert agree("mhc_post_pre", returned(made), wanted)
