"""Every kernel at small sizes for compute-sanitizer: ``python -m tests.dsv4.cuda.sanitized [TOOL | OP...]``.

Arguments are made on the CPU and copied over, and outs are copied back, storage by storage: no kernel but ours touches
the device's memory, so that the tools need not watch PyTorch's, and know what was written. With a tool's name, a kernel
with the fault that it is for runs alone; with beginnings of calls' descriptions, those. `arrival` and `copied out` are
right, and a tool says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.kernels.calls import CALLS, call
from benchmarks.kernels.maker import Call, Maker
from dsv4.ops import kernels
from tests.dsv4.cuda.test_combine_indices import CASES, MOST, WINDOW, given
from tests.dsv4.cuda.test_experts import FEW, HIDDEN, routed
from tests.dsv4.cuda.test_numbers import SHAPES

ROWS = (1, 2, 17)

OF_KERNELS = {"mhc_pre": (15, 800), "mhc_post_pre": (15, 800)}
"""More rows of ops that have a kernel for few and one for others: the most of the former, and many tiles."""

OTHER_ROWS, INSERTED_ROWS = 7, 37
"""Of what has other shapes; of insertions, some of which name how many of them are inserted."""

COPIED_OUT = {"mhc_post_pre 17": (0,), "mhc_post_pre 800": (0,)}
"""Outs, by their place, that the copying unit (TMA) writes: initcheck does not follow it, and takes them for unwritten
(`test_initcheck_does_not_follow_the_copying_unit`), each 32 bytes a report. They are written before. That the kernel
writes them all is shown by the tests that poison outs."""

SMALLER = {"sparse_attention_decode": {"states": 512}}
"""Caches that the CPU fills quickly."""

PLANTED = {
    "memcheck": (
        'extern "C" __global__ void dsv4_planted(float* x, int n) { if (threadIdx.x == 0) x[n] = 1.0f; }',
        lambda: torch.empty(8),
    ),
    "initcheck": (
        'extern "C" __global__ void dsv4_planted(float* x, int n) { if (x[n - 1] == 3.0f) x[0] = 1.0f; }',
        lambda: None,
    ),
    "racecheck": (
        'extern "C" __global__ void dsv4_planted(float* x, int n) {\n'
        "  __shared__ float held[64];\n"
        "  held[threadIdx.x] = threadIdx.x;\n"
        "  x[threadIdx.x & 7] = held[threadIdx.x ^ 32];\n}",
        lambda: torch.empty(8),
    ),
    "arrival": (
        'extern "C" __global__ void dsv4_planted(float* x, int n) {\n'
        "  __shared__ float held[32];\n"
        "  __shared__ unsigned long long barrier;\n"
        "  const unsigned at = __cvta_generic_to_shared(&barrier), lane = threadIdx.x % 32;\n"
        '  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");\n'
        "  __syncthreads();\n"
        "  if (threadIdx.x < 32) {\n"
        "    held[lane] = lane;\n"
        "    __syncwarp();\n"
        '    if (lane == 0) asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(at) : "memory");\n'
        "  } else {\n"
        "    for (unsigned done = 0; !done;)\n"
        '      asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"\n'
        '                   : "=r"(done) : "r"(at) : "memory");\n'
        "    x[lane % 8] = held[lane ^ 1];\n"
        "  }\n}",
        lambda: torch.empty(8),
    ),
}
"""By tool: a kernel that writes behind its tensor, reads what nobody wrote, or reads another warp's shared bytes. And
one that is right: a lane arrives at a barrier for its warp, whose bytes another warp reads after it."""


def on_device(made: Call, written: Collection[int] = ()) -> Call:
    """The call over device memory, strides kept; outs are left as the allocator gives them, but for those of places."""
    kept = (one.partly for one in (made.op.outs | made.op.scratch).values())
    outs = [
        _copied(torch.zeros_like(one)) if partly or place in written else torch.empty_like(one, device="cuda")
        for place, (one, partly) in enumerate(zip((*made.outs, *made.scratch), kept, strict=True))
    ]
    inputs = tuple(_copied(one) if isinstance(one, torch.Tensor) else one for one in made.inputs)
    return Call(made.op, inputs, tuple(outs[: len(made.outs)]), tuple(outs[len(made.outs) :]))


def _copied(one: torch.Tensor) -> torch.Tensor:
    """Whole storages, which needs no kernel."""
    held = torch.empty(0, dtype=one.dtype, device="cuda").set_(one.untyped_storage().cuda())
    return held.as_strided(one.shape, one.stride(), one.storage_offset())


def calls(wanted: tuple[str, ...] = ("",), without: tuple[str, ...] = ()) -> Iterator[tuple[str, Call]]:
    """Ops at small sizes, and in their other shapes, by what their descriptions begin with."""
    for what, make in _calls():
        if what.startswith(wanted) and not what.startswith(without):
            yield what, make()


def _calls() -> Iterator[tuple[str, Callable[[], Call]]]:
    def small(name: str, rows: int, how: dict[str, Any]) -> Callable[[], Call]:
        return lambda: call(name, rows, device="cpu", **SMALLER.get(name, {}) | how)

    for name in CALLS:
        for rows in (*ROWS, *OF_KERNELS.get(name, ())):
            yield f"{name} {rows}", small(name, rows, {})
    for name, how in SHAPES:
        yield f"{name} {how}", small(name, INSERTED_ROWS if "insert" in name else OTHER_ROWS, how)
    for rows in FEW:
        yield f"routed_experts {rows}", partial(routed, rows, elsewhere=True, device="cpu")


def combine_indices() -> None:
    """Which gathered keys rows attend to: a kernel with the fast face only."""
    for ratio, chosen in CASES:
        inputs = [_copied(one) if isinstance(one, torch.Tensor) else one for one in given(ratio, chosen, "cpu")]
        rows = len(inputs[0])
        outs = torch.empty(rows, WINDOW + MOST, dtype=torch.int32, device="cuda"), torch.empty_like(inputs[1])
        assert kernels.FAST["combine_indices"](*inputs, *outs)
        outs[0].cpu(), outs[1].cpu()


def combine_experts() -> None:
    """Sums experts' shares: a kernel that has no op of its own."""
    m, rows, k = Maker("cpu", 0, "random"), 17, 6
    experts = torch.randint(-1, 8, (rows, k), generator=m.generator, dtype=torch.int32)
    places = torch.randperm(rows * k, generator=m.generator)
    given = m.noise(rows * k, HIDDEN), places, experts, m.plain(rows, k)
    y = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    assert kernels.FAST["combine_experts"](*map(_copied, given), y)
    y.cpu()


def planted(tool: str) -> None:
    """One kernel with a fault."""
    source, make = PLANTED[tool]
    held = make()
    x = torch.empty(8, device="cuda") if held is None else _copied(held)
    kernel = torch.cuda._compile_kernel(source, "dsv4_planted")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[x, x.numel()])
    torch.cuda.synchronize()


def copied_out() -> None:
    """A call that is right, of whose first out the copying unit has written all; a part of it is read."""
    on_device(call("mhc_post_pre", 17, device="cpu")).run()[0].flatten()[:512].cpu()


def main() -> None:
    """Runs them, and says how many: all, those that begin so, or all but those that begin as what a minus precedes."""
    names = tuple(name for name in sys.argv[1:] if not name.startswith("-"))
    without = tuple(name[1:] for name in sys.argv[1:] if name.startswith("-"))
    if names[:1] and names[0] in PLANTED:
        planted(names[0])
        return
    if names == ("copied out",):
        copied_out()
        return
    count, began = 0, perf_counter()
    for what, made in calls(names or ("",), without):
        for one in on_device(made, COPIED_OUT.get(what, ())).run():
            one.untyped_storage().cpu()
        count += 1
        print(f"{perf_counter() - began:6.1f} s  {what}", flush=True)
    if not names:
        combine_indices()
        combine_experts()
        count += len(CASES) + 1
    print(f"{count} calls")


if __name__ == "__main__":
    main()
