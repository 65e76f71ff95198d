"""o: what the rest of the process sees of the library's memory."""

from __future__ import annotations

import torch

from workspace.errors import OutOfMemory
from workspace.testing.bench import BLOCK, OTHER, Bench
from workspace.testing.failure import ContractBroken, require
from workspace.testing.scenario import scenario


@scenario("o1", "P", no_control="a sum is compared with a sum: there is no guard", real=False)
def reservation_is_what_the_device_loses(bench: Bench) -> None:
    """reserve() returns what the framework's allocator takes from the device, within a segment, and nothing follows."""
    ws = bench.ws
    ws.declare(BLOCK, N=bench.mib(37))
    ws.declare(OTHER, N=bench.mib(11), phase="one")
    ws.declare(BLOCK, N=bench.mib(5), lane="decode", count=2)
    before = bench.reserved()
    total = ws.reserve()
    taken = bench.reserved() - before
    held = ws.snapshot().reserved
    require(0 <= taken - total <= bench.segment, f"reserve() says {total} bytes, the device lost {taken}")
    require(0 <= taken - held <= bench.segment, f"the snapshot says {held}, the device lost {taken}")
    with ws.lease(BLOCK, N=bench.mib(37)) as lease, ws.lease(OTHER, N=bench.mib(11)):
        bench.fill(lease.data, 1)
    ws.reserve()
    require(bench.reserved() - before == taken, "a declared request took more")


@scenario("o1-retry", "P", "give up", evidence="failure", real=False)
def idle_slabs_go_when_memory_runs_out(bench: Bench) -> None:
    """The framework runs out of memory: idle slabs are trimmed and the call succeeds."""
    ws = bench.ws
    with ws.lease(BLOCK, N=bench.mib(64)):
        pass
    with bench.device_capacity(bench.reserved() + bench.mib(16)):
        calls = []

        def kernel() -> object:
            calls.append(1)
            return bench.allocate(bench.mib(48))

        try:
            ws.retry_on_oom(kernel)
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            raise ContractBroken(f"idle bytes were kept: {error}") from error
        require(len(calls) == 2, f"the call was made {len(calls)} times")
