"""One rank of scenario a6 on NCCL: ``python -m tests.cuda.collective RANK PORT until|early``.

Rank 0 gives a lease to an all-reduce, releases it and fills the bytes anew, while rank 1 is late: the collective is in
flight and reads rank 0's bytes only then. What rank 1 gets is the judge.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import workspace

COUNT = 16 << 20
"""Numbers: 64 MiB, far more than NCCL holds in buffers of its own."""

DELAY = 400_000_000
"""Cycles that rank 1 is late: 0.2 s at 2 GHz."""

NUMBERS = workspace.Layout("numbers", data=workspace.spec(COUNT, dtype=torch.int32))


def reduced(rank: int, waited: bool) -> torch.Tensor:
    """The sum that this rank was left with; rank 0 releases before it is there."""
    ws = workspace.create("event_fenced", device=f"cuda:{rank}")
    with torch.no_grad(), ws.on(ws.stream("main")):
        lease = ws.acquire(NUMBERS)
        lease.data.fill_(rank + 1)
        found = torch.empty_like(lease.data)
        if rank == 1:
            torch.cuda._sleep(DELAY)
        work = dist.all_reduce(lease.data, async_op=True)
        if rank == 1:
            work.wait()
            found.copy_(lease.data)
        elif waited:
            ws.until(work)
        lease.release()
        with ws.lease(NUMBERS) as again:
            again.data.fill_(93)
        ws.synchronize()
    return found


def main() -> None:
    """Prints how many numbers of rank 1 are not the sum."""
    rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, device_id=device)
    warm = torch.zeros(COUNT, dtype=torch.int32, device=device)
    dist.all_reduce(warm)
    torch.cuda.synchronize()
    found = reduced(rank, how == "until")
    if rank == 1:
        print((found != 3).sum().item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
