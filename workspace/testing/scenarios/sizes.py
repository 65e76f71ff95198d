"""i: alignment, large sizes and empty ones."""

from __future__ import annotations

import torch

from workspace.errors import LayoutError, SizeError
from workspace.layout import Layout, spec
from workspace.testing.bench import BLOCK, Bench
from workspace.testing.failure import refused, require
from workspace.testing.scenario import scenario

MIXED = Layout(
    "mixed", a=spec(3, dtype=torch.uint8), b=spec(5, dtype=torch.float64), c=spec(7, dtype=torch.float16),
    d=spec(1, dtype=torch.float8_e4m3fn), e=spec(0, 4, dtype=torch.bfloat16), f=spec(9, dtype=torch.int32, align=4096),
)  # fmt: skip


def _aligned(bench: Bench, strategy: str | None = None) -> None:
    ws = bench.workspace(strategy)
    with ws.lease(MIXED) as one, ws.lease(MIXED) as two:
        for value, lease in ((1, one), (2, two)):
            for name, tensor in lease.tensors.items():
                if tensor.numel():
                    align = 4096 if name == "f" and ws.provider.lends_tensors else 256
                    require(bench.address(tensor) % align == 0, f"{name} is at {bench.address(tensor):#x}")
                    bench.fill(tensor, value)
        for value, lease in ((1, one), (2, two)):
            for tensor in lease.tensors.values():
                if tensor.numel():
                    bench.expect(bench.copy(tensor), value)
    # Sizes without slack: what is moved to an aligned address must not run into the next lease.
    leases = [ws.acquire(BLOCK, N=4096) for _ in range(3)]
    for value, lease in enumerate(leases, 3):
        bench.fill(lease.data, value)
    for value, lease in enumerate(leases, 3):
        bench.expect(bench.copy(lease.data), value)
        lease.release()
    # A whole slab: what is moved must not run over its end.
    with ws.lease(BLOCK, N=bench.mib(2)) as whole:
        bench.fill(whole.data, 9)
        bench.expect(bench.copy(whole.data), 9)
    bench.check()


@scenario("i1", "P", no_control="an aligned base needs no guard: i1-offset is the same with one, and its control")
def each_tensor_aligned(bench: Bench) -> None:
    """Tensors of odd shapes and all widths begin at multiples of 256 bytes, or of what they ask for."""
    _aligned(bench)


@scenario("i1-offset", "P", "alignment", evidence="failure")
def base_off_by_sixteen(bench: Bench) -> None:
    """The same when the framework's allocator hands out bases that are off by 16 bytes."""
    with bench.offset_bases(16):
        _aligned(bench)
    with bench.offset_bases(0):
        ws = bench.workspace()
        with ws.lease(BLOCK, N=bench.mib(2)) as lease:
            bench.fill(lease.data, 1)
            base = ws.strategy_object.pool.slabs[0].buffer.address  # type: ignore[attr-defined]
            require(bench.address(lease.data) == base, "an aligned base was moved")


@scenario("i2", "P", no_control="a size is arithmetic: there is no guard", real=False)
def more_than_two_gigabytes(bench: Bench) -> None:
    """70,000 x 40,000 bytes: the size is right and the last byte is in reach."""
    ws = bench.ws
    layout = Layout("large", data=spec("T", 40_000, dtype=torch.uint8))
    require(layout.size(T=70_000) >= 2_800_000_000, "the size wrapped")
    with ws.lease(layout, T=70_000) as lease:
        last = lease.data[69_999:70_000]
        bench.fill(lease.data, 1)
        bench.fill(last, 2)
        require(bench.address(last) == bench.address(lease.data) + 69_999 * 40_000, "the last row is elsewhere")
        require(ws.snapshot().allocated >= 2_800_000_000, "less than the size is on lease")


@scenario("i2-overflow", "R")
def sizes_that_do_not_exist(bench: Bench) -> None:
    """Sizes that overflow, are negative, or are no integers: refused, and nothing changes."""
    ws = bench.ws
    before = ws.snapshot()
    for bad in (2**63, 2**64, -1, 2.0, True, "2"):
        with refused(SizeError, LayoutError):
            ws.acquire(BLOCK, N=bad)  # type: ignore[arg-type]
    with refused(LayoutError):
        ws.acquire(BLOCK)
    with refused(LayoutError):
        ws.acquire(BLOCK, N=1, M=2)
    with refused(SizeError, LayoutError):
        ws.empty((-1,), torch.uint8)
    require(ws.snapshot() == before, "a refusal changed the state")


@scenario("i2-too-large", "R", virtual=False)
def sizes_no_device_has(bench: Bench) -> None:
    """More bytes than a device holds: a typed error, and nothing changes."""
    from workspace.errors import CapacityError

    ws = bench.ws
    before = ws.snapshot()
    for exponent in (50, 62):  # beyond any processor's address space, so that no host overcommits it
        with refused(CapacityError), ws.lease(BLOCK, N=2**exponent) as lease:
            bench.fill(lease.data, 1)
    after = ws.snapshot()
    require((after.allocated, after.reserved) == (before.allocated, before.reserved), "a refusal changed the state")
    with ws.lease(BLOCK, N=bench.mib(1)) as lease:
        bench.fill(lease.data, 1)
        bench.expect(bench.copy(lease.data), 1)


@scenario("i3", "P", no_control="an empty tensor needs no bytes: there is no guard")
def empty_tensors(bench: Bench) -> None:
    """Zero rows: an empty tensor of the right type, no growth, also locked, in a capture, and as a single."""
    ws = bench.ws
    layout = Layout("rows", data=spec("T", 8, dtype=torch.bfloat16))
    reserved = ws.snapshot().reserved

    def look() -> None:
        with ws.lease(layout, T=0) as lease:
            require(tuple(lease.data.shape) == (0, 8), f"shape {tuple(lease.data.shape)}")
            require(lease.data.dtype is torch.bfloat16, f"dtype {lease.data.dtype}")
            ws.use(lease, bench.streams(1)[0])
        single = ws.empty((0, 8), torch.bfloat16)
        require(tuple(single.shape) == (0, 8), "a single empty tensor has another shape")
        ws.use(single, bench.streams(1)[0])

    look()
    ws.lock()
    look()
    ws.unlock()
    with ws.capture(), ws.lease(layout, T=0) as lease:
        require(lease.data.numel() == 0, "not empty in a capture")
    require(ws.snapshot().reserved == reserved, "an empty lease made the pool grow")


@scenario("i3-beside", "P", "exclusive", evidence="bytes")
def empty_beside_full(bench: Bench) -> None:
    """Empty and full tensors that share an address do not take each other's place in the books."""
    ws, nbytes = bench.ws, bench.mib(1)
    (s1,) = bench.streams(1)
    empty = ws.empty((0,), torch.uint8)
    full = ws.empty((nbytes,), torch.uint8)
    bench.fill(full, 1)
    del empty
    with ws.lease(BLOCK, N=0), ws.lease(BLOCK, N=nbytes) as lease:
        bench.fill(lease.data, 2)
        bench.order(bench.main, s1)
        ws.use(full, s1)
        bench.expect(bench.copy(full, s1), 1)
        bench.expect(bench.copy(lease.data), 2)
