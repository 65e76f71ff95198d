"""c: several tensors in one slab."""

from __future__ import annotations

import itertools

import torch

from workspace.errors import LayoutError
from workspace.layout import ALIGNMENT, Exclusive, Layout, TensorSpec, round_up, spec
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario


def _bytes(dim: str) -> TensorSpec:
    return spec(dim, dtype=torch.uint8)


@scenario("c1", "P", "offsets", evidence="failure")
def one_call_disjoint_ranges(bench: Bench) -> None:
    """One lease of 12 MiB, 4 MiB, 1 KiB and nothing: disjoint ranges, in bytes enough for all of them."""
    ws = bench.ws
    four = Layout("four", t0=_bytes("N0"), t1=_bytes("N1"), t2=_bytes("N2"), t3=_bytes("N3"))
    sizes = [bench.mib(12), bench.mib(4), 1024, 0]
    with ws.lease(four, N0=sizes[0], N1=sizes[1], N2=sizes[2], N3=sizes[3]) as lease:
        tensors = [getattr(lease, f"t{n}") for n in range(4)]
        for value, tensor in enumerate(tensors, 1):
            bench.fill(tensor, value)
        for value, (tensor, size) in enumerate(zip(tensors, sizes, strict=True), 1):
            require(tensor.numel() == size, f"t{value - 1} has {tensor.numel()} of {size} bytes")
            bench.expect(bench.copy(tensor), value)
        ranges = sorted((bench.address(one), size) for one, size in zip(tensors, sizes, strict=True) if size)
        for (start, size), (after, _) in itertools.pairwise(ranges):
            require(start + size <= after, f"[{start:#x}, +{size}) overlaps what begins at {after:#x}")
        total = sum(round_up(size, ALIGNMENT) for size in sizes)
        require(ws.snapshot().allocated >= total or not ws.provider.lends_tensors, "less on lease than the sum")
        bench.check()


@scenario("c1-live-together", "P", "exclusive", evidence="bytes")
def leases_that_live_together(bench: Bench) -> None:
    """Leases held at once keep to themselves, whatever order they come and go in."""
    ws = bench.ws
    sizes = [1, 3, 2, 0.5, 4, 0.25]
    live = []
    for value, size in enumerate(sizes, 1):
        layout = (BLOCK, OTHER)[value % 2]
        lease = ws.acquire(layout, N=bench.mib(size))
        bench.fill(lease.data, value)
        live.append((value, lease))
        if value == 4:
            _, gone = live.pop(1)
            gone.release()
    for value, lease in live:
        bench.expect(bench.copy(lease.data), value)
        lease.release()


@scenario("c2", "R")
def exclusive_groups_on_two_streams(bench: Bench) -> None:
    """Groups that may share bytes must name one stream."""
    a, b = _bytes("N"), _bytes("N")
    with refused(LayoutError) as refusal:
        Layout("two", exclusive=(Exclusive((("a",), ("b",)), ("main", "aux0")),), a=a, b=b)
    refusal.names("stream")
    with refused(LayoutError):
        Layout("two", exclusive=(Exclusive((("a",), ("c",)), ("main", "main")),), a=a, b=b)
    bench.no_race()


@scenario("c2-lied", "D", "judge", evidence="failure")
def exclusive_groups_used_at_once(bench: Bench) -> None:
    """Groups declared for one stream and used on two at once are reported."""
    (s1,) = bench.streams(1)
    layout = Layout(
        "two", exclusive=(Exclusive((("a",), ("b",)), ("main", "main")),),
        a=_bytes("N"), b=_bytes("N"),
    )  # fmt: skip
    ws = bench.ws
    with ws.lease(layout, N=bench.mib(1)) as lease:
        a, b = lease.a, lease.b
        bench.fill(a, 1)
        ws.use(lease, s1)
        bench.fill(b, 2, s1)
    bench.detect("fill 1", "fill 2")
