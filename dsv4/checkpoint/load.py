"""From a folder to the weights of one rank."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch

from dsv4.checkpoint.checkpoint import Checkpoint
from dsv4.checkpoint.errors import listed
from dsv4.model.precision import Precision
from dsv4.model.weights import Assembly, DraftWeights, ModelWeights
from dsv4.shard import Shard


@attrs.frozen(eq=False)
class Loaded:
    """Weights of one rank: the model's, and of each MTP block that the folder holds."""

    shard: Shard
    model: ModelWeights
    drafts: tuple[DraftWeights, ...]


def load(
    path: str | Path,
    *,
    layers: int | None = None,
    experts: int | None = None,
    precision: Precision | None = None,
    shard: Shard | None = None,
    device: torch.device | str = "cpu",
) -> Loaded:
    """Read a folder; see `Checkpoint` for what it may hold and what `layers` and `experts` do.

    Parameters
    ----------
    precision
        What the weights become; by default float32.
    shard
        Whose share of the weights; by default the whole model's.

    Raises
    ------
    ModelConfigError, CheckpointError
        As by `Checkpoint`; or the shard's config is not the folder's, with every field that differs.
    """
    checkpoint = Checkpoint(path, layers, experts, device)
    config = checkpoint.config
    shard = shard or Shard(config, attention="flashinfer")
    asked = attrs.asdict(shard.config, recurse=False)
    problems = [
        f"{name} is {value!r} in the folder, and {asked[name]!r} was asked for"
        for name, value in attrs.asdict(config, recurse=False).items()
        if value != asked[name]
    ]
    if problems:
        raise listed(path, problems, "make the shard of the folder's config, or leave it out")
    assembly = Assembly(shard, precision or Precision(), checkpoint, device)
    drafts = tuple(assembly.draft(block) for block in range(config.num_nextn_predict_layers))
    return Loaded(shard, assembly.model(), drafts)
