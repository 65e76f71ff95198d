"""Cells of the matrix strategy x run mode x aux streams x micro-batches on a GPU, with delays and poison when asked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import attrs
import torch

import workspace
from dsv4.model.execution import GENERATED, SCRIPT, Execution
from dsv4.model.forward import Forward
from dsv4.model.precision import SERVED
from dsv4.model.presets import MIXED
from dsv4.presets import FLASH
from tests.dsv4.model.cells import SAFE, Setting

STEPS = len(SCRIPT) + GENERATED
"""Of one run of the script."""

SIX: dict[str, Any] = {"num_hidden_layers": 6, "compress_ratios": (0, 4, 128, 4, 128, 0, 0)}
"""Two layers of each kind."""

MODELS = {
    "small": attrs.evolve(MIXED, hidden_size=256, head_dim=512, index_topk=16, **SIX),
    "flash": attrs.evolve(FLASH, n_routed_experts=8, moe_intermediate_size=256, vocab_size=4096, **SIX),
}
"""`small`: the widths that the kernels are for, with few heads and little else. `flash`: Flash's attention shapes."""

LONGEST = 40_000
"""Cycles of the longest delay: about 20 us, some kernels long."""

OFTEN = 0.3

HEADROOM = 3.0
"""The script locks its workspace: what lives together has to fit in the pieces that earlier steps left."""


@cache
def execution(model: str) -> Execution:
    return Execution(MODELS[model], SERVED, device="cuda")


@contextmanager
def opened(model: str, strategy: str, setting: Setting, **settings: Any) -> Iterator[Any]:
    """The script on a workspace of its own."""
    mode, aux_streams, micro_batches = setting
    settings |= {"micro_batches": micro_batches, "headroom": HEADROOM, "allow_unsafe": strategy not in SAFE}
    with torch.no_grad():
        ws = workspace.create(strategy, device="cuda", **settings)
        program = execution(model).prepare(ws, mode, aux_streams, micro_batches)
        try:
            yield program
        finally:
            program.close()
            ws.synchronize()


def ran(model: str, strategy: str, setting: Setting, programs: int = 1, **settings: Any) -> list[list[torch.Tensor]]:
    """Generated tokens and logits of some runs, one after the other on one workspace."""
    with opened(model, strategy, setting, **settings) as program:
        return [program.run() for _ in range(programs)]


@cache
def reference(model: str, setting: Setting) -> list[torch.Tensor]:
    """`caching`, without delays."""
    return ran(model, "caching", setting)[0]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest root mean square of the difference of a token's logits, over the steps with known tokens.

    What is generated may part from there on.
    """
    steps = slice(1, 1 + len(SCRIPT))
    differences = (a.float() - b.float() for a, b in zip(one[steps], other[steps], strict=True))
    return max(float(rows.square().mean(1).sqrt().max()) for rows in differences)


@contextmanager
def rounded_once(model: str, seed: int) -> Iterator[None]:
    """Each number of the embeddings is the next or the last one of its dtype."""
    embed = execution(model).weights.embed
    before, bits = embed.clone(), embed.view(torch.int16)
    generator = torch.Generator(embed.device).manual_seed(seed)
    up = torch.randint(2, bits.shape, generator=generator, device=embed.device, dtype=torch.int16)
    bits += torch.where(before == 0, 0, 2 * up - 1)
    try:
        yield
    finally:
        embed.copy_(before)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@contextmanager
def delays(seed: int) -> Iterator[None]:
    """Before every part of a layer, on whichever stream it runs, sometimes a kernel that only takes time."""
    chance, plain = random.Random(seed), Forward.run

    def run(self: Forward, steps: Any) -> None:
        if chance.random() < OFTEN:
            torch.cuda._sleep(chance.randrange(LONGEST))
        plain(self, steps)

    Forward.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Forward.run = plain  # type: ignore[method-assign]


def mismatches(
    model: str, strategy: str, setting: Setting, steps: int, seed: int = 0, delayed: bool = True, **settings: Any
) -> tuple[int, int]:
    """Steps that were run under delays, and how many of them left other bits than `caching` without any.

    The steps of a script that follow a wrong one read what it left in the caches, and count as well.
    """
    wanted = reference(model, setting)
    wrong, programs = 0, -(-steps // STEPS)
    with delays(seed) if delayed else nullcontext(), opened(model, strategy, setting, **settings) as program:
        for _ in range(programs):
            tokens, *logits = program.run()
            differ = [not torch.equal(_bits(a), _bits(b)) for a, b in zip(logits, wanted[1:], strict=True)]
            if not any(differ) and not torch.equal(tokens, wanted[0]):
                differ[-1] = True
            wrong += sum(differ)
    return programs * STEPS, wrong
