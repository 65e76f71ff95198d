"""One rank of a model by seed: what it computes goes to a file.

``python -m tests.dsv4.parallel.worker FOLDER DEVICE``, in the environment of ``torchrun``.
"""

from __future__ import annotations

import sys
from typing import Any

import attrs
import torch

import workspace
from dsv4 import parallel
from dsv4.cache.caches import Caches
from dsv4.model.decoder import Decoder, Draft
from dsv4.model.presets import MIXED
from dsv4.model.random_weights import RandomTensors
from dsv4.model.reserve import reserve
from dsv4.model.runner import Runner
from dsv4.model.weights import Assembly
from dsv4.options import Options
from dsv4.scheduler import Rows
from dsv4.shard import Shard
from tests.dsv4.model.made import ENGINE, EXACT, blocks_for, context, prompt, step

LENGTH, GENERATED = 300, 12
"""Past two windows and two groups of 128; from 132 tokens on the indexer chooses."""


def computed(ranks: parallel.Ranks, strategy: str, summing: bool = True) -> dict[str, Any]:
    """Logits of a prompt and of each token generated greedily, those tokens, the MTP block's logits, and weights."""
    shard = Shard(MIXED, tensor_parallel=ranks.size, rank=ranks.rank, attention="flashinfer")
    assembly = Assembly(shard, EXACT, RandomTensors(MIXED, 0), ranks.device)
    ws = workspace.create(strategy, device=str(ranks.device))
    caches = Caches(MIXED, EXACT.storage, blocks_for(MIXED, 512), device=ranks.device)
    all_reduce = ranks.all_reduce if summing else None
    model = Decoder(ws, shard, EXACT, ENGINE, assembly.model(), caches, all_reduce=all_reduce)
    one = context(model, prompt(MIXED, LENGTH))
    contexts = {0: one}
    outcome, logits = step(model, contexts, (0, 0, LENGTH, True))
    found, tokens = [logits], []
    for at in range(LENGTH, LENGTH + GENERATED):
        tokens.append(int(found[-1][-1].argmax()))
        one.append(tokens[-1:])
        found.append(step(model, contexts, (0, at, 1, False))[1])
    draft_blocks = blocks_for(MIXED, 512, draft=True)
    draft_caches = Caches(MIXED, EXACT.storage, draft_blocks, draft=True, device=ranks.device)
    draft = Draft(model, assembly.draft(), draft_caches)
    with ws.on(model.main), ws.slot(lane="draft"):
        drafted = draft.forward([Rows(0, 0, LENGTH, True, True)], contexts, outcome.residual)
        drafted_logits = model.logits(drafted.hidden)
    ws.synchronize()
    one.free()
    return {
        "logits": torch.cat(found).cpu(),
        "tokens": tokens,
        "draft": drafted_logits.cpu(),
        "leased": ws.snapshot().allocated,
        "layer": attrs.asdict(model.weights.layers[1]),
    }


def in_two_micro_batches(ranks: parallel.Ranks) -> torch.Tensor:
    """Logits of two prompts side by side: the sums of one micro-batch are under way while the other takes its turn."""
    shard = Shard(MIXED, tensor_parallel=ranks.size, rank=ranks.rank, attention="flashinfer")
    weights = Assembly(shard, EXACT, RandomTensors(MIXED, 0), ranks.device).model()
    ws = workspace.create("event_fenced", device=str(ranks.device), micro_batches=2)
    options = Options(micro_batches=2)
    reserve(ws, shard, EXACT, ENGINE, options)
    caches = [Caches(MIXED, EXACT.storage, blocks_for(MIXED, 512), device=ranks.device) for _ in range(2)]
    runner = Runner(ws, shard, EXACT, ENGINE, weights, caches, options, all_reduce=ranks.all_reduce)
    lengths = LENGTH // 2, LENGTH // 3
    contexts = {i: context(runner.decoders[0], prompt(MIXED, length, i)) for i, length in enumerate(lengths)}
    found = runner.forward([Rows(i, 0, length, True, True) for i, length in enumerate(lengths)], contexts)
    assert {runner.home(one) for one in contexts.values()} == {0, 1}
    logits = runner.logits(found.hidden)
    ws.synchronize()
    runner.close()
    return logits.cpu()


def refused(ranks: parallel.Ranks) -> str:
    """What a rank is told when rank 1 was started with other options."""
    config = attrs.evolve(MIXED, index_topk=8) if ranks.rank == 1 else MIXED
    try:
        ranks.agree(config, seed=ranks.rank, layers=4)
    except parallel.ParallelError as error:
        return str(error)
    return ""


def main(folder: str, device: str) -> None:
    torch.set_num_threads(1)
    ranks = parallel.group(device)
    ranks.agree(MIXED, seed=0)
    found: dict[str, Any] = {strategy: computed(ranks, strategy) for strategy in ("event_fenced", "caching")}
    found |= {"micro_batches": in_two_micro_batches(ranks), "refused": refused(ranks)}
    torch.save(found, f"{folder}/{ranks.rank}.pt")
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
