"""The processes that share one model, as ``torchrun`` starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist

from dsv4.config import ModelConfig
from dsv4.parallel.errors import ParallelError

ENVIRONMENT = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What `group` needs besides WORLD_SIZE; ``torchrun`` sets all of them."""


MOST_RANKS = 9999
"""Far above what can share a model; a larger WORLD_SIZE is a slip."""


@attrs.frozen
class Ranks:
    """This process among those that share a model; a process on its own is rank 0 of 1.

    Attributes
    ----------
    rank, size
        This one's number, and how many there are.
    device
        Where this rank's weights, caches and workspace belong.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def all_reduce(self) -> Callable[[torch.Tensor], Any] | None:
        """What `dsv4.model.decoder.Decoder` sums with; None for one rank.

        Every rank must call it in the same order, with tensors of one shape and dtype. The sum is in place, ordered
        after the current stream's work; ``wait()`` of the handle makes the current stream (on the CPU: the host)
        wait for it.
        """
        return _all_reduce if self.size > 1 else None

    def agree(self, config: ModelConfig, **options: object) -> None:
        """Check that all ranks were started with one config and the same options.

        Every rank must call it. Options are compared with ``==`` and must be picklable.

        Raises
        ------
        ParallelError
            On every rank alike; lists what differs, with each rank's value.
        """
        if self.size == 1:
            return
        given: list[Any] = [None] * self.size
        dist.all_gather_object(given, attrs.asdict(config, recurse=False) | options)
        problems = list(_differences(given))
        if problems:
            raise ParallelError(
                "the ranks do not run one model:" + "".join(f"\n  - {problem}" for problem in problems),
                "start every rank with the same options and the same checkpoint",
                problems=problems,
            )

    def close(self) -> None:
        """Leave the group; for a process on its own nothing."""
        if self.size > 1:
            dist.destroy_process_group()


def group(device: str = "cpu", environment: Mapping[str, str] = os.environ) -> Ranks:
    """Join the ranks that the environment names: ``gloo`` on CPUs, NCCL on GPUs, one GPU each.

    Parameters
    ----------
    device
        ``"cpu"`` or ``"cuda"``; of several ranks on a host, each takes the GPU of its LOCAL_RANK.
    environment
        WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as ``torchrun`` sets them. Without WORLD_SIZE, or
        with 1, the process is on its own and nothing is joined.

    Raises
    ------
    ParallelError
        The environment is incomplete, a number in it is none or out of range, or the host has no GPU for this rank.
    """
    size = _number(environment, "WORLD_SIZE", 1, MOST_RANKS) if "WORLD_SIZE" in environment else 1
    if size == 1:
        return Ranks(0, 1, torch.device(device))
    missing = [name for name in ENVIRONMENT if name not in environment]
    if missing:
        raise ParallelError(
            f"WORLD_SIZE is {size}, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            f"start the ranks with `torchrun --nproc-per-node {size} -m dsv4 ...`",
        )
    rank, local = (_number(environment, name, 0, size - 1) for name in ("RANK", "LOCAL_RANK"))
    port = _number(environment, "MASTER_PORT", 1, 65535)
    own = torch.device(device)
    if own.type == "cuda":
        own = _gpu(local)
    where = f"tcp://{environment['MASTER_ADDR']}:{port}"
    backend = "nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size)
    return Ranks(rank, size, own)


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environment[name]
    # Digits are counted first: int() takes only so many, with an error of its own.
    plain = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not plain or not least <= int(text) <= most:
        raise ParallelError(
            f"{name}={text[:80]!r} is no integer from {least} to {most}",
            "start the ranks with `torchrun`, which sets it, or unset WORLD_SIZE for a process on its own",
            name=name,
            value=text,
        )
    return int(text)


def _gpu(local: int) -> torch.device:
    there = torch.cuda.device_count()
    if local >= there:
        raise ParallelError(
            f"local rank {local} has no GPU: this host has {there}", f"start at most {there} ranks on it"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _all_reduce(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


def _differences(given: list[dict[str, Any]]) -> Iterator[str]:
    for name in dict.fromkeys(name for one in given for name in one):
        values = [one.get(name) for one in given]
        if any(value != values[0] for value in values):
            yield f"{name} is " + ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
