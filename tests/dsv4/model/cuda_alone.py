"""Runs on a GPU that need a process of their own: ``python -m tests.dsv4.model.cuda_alone NAME``."""

from __future__ import annotations

import sys

import torch

from dsv4.model.forward import Forward
from dsv4.model.route import Forked
from tests.dsv4.model.cuda_cells import mismatches, ran, reference, same


def first(mode: str) -> int:
    """A mode with graphs before any other work of the process."""
    setting = mode, True, 1
    found = ran("small", "event_fenced", setting)[0]
    return int(not same(found, reference("small", setting)))


def unfenced(micro_batches: str) -> int:
    """The unfenced pool under delays."""
    return mismatches("small", "unfenced", ("eager", True, int(micro_batches)), 40)[1]


def unjoined() -> int:
    """Forks whose branches nobody waits for."""

    def unordered(self: Forward, node: Forked) -> None:
        for one in node.branches:
            with self.ws.on(self.streams[one.stream]):
                torch.cuda._sleep(2_000_000)
                self.run(one.nodes)
            for lease in self.leases.values():
                lease.use(self.streams[one.stream])
        self.run(node.body)

    setting = "eager", True, 1
    reference("small", setting)
    Forward.fork = unordered  # type: ignore[method-assign]
    return mismatches("small", "event_fenced", setting, 5, delayed=False)[1]


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(f"{ {one.__name__: one for one in (first, unfenced, unjoined)}[name](*arguments) } wrong")
