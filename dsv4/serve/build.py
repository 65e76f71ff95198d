"""From options to a model that a server can step: the one place where the parts are put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import torch

import workspace
from dsv4 import parallel
from dsv4.cache.caches import Caches
from dsv4.cache.pages import Format
from dsv4.cache.paging import Paging
from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig, reduced
from dsv4.configfile import resolve
from dsv4.engine import Engine
from dsv4.errors import RequestError, RunError
from dsv4.model.precision import SERVED, Precision
from dsv4.model.presets import MIXED
from dsv4.model.random_weights import RandomTensors
from dsv4.model.reserve import reserve
from dsv4.model.runner import Runner
from dsv4.model.weights import Assembly
from dsv4.ops import kernels
from dsv4.options import Options
from dsv4.presets import PRESETS
from dsv4.serve.budget import Caching, check_weights, size_caches
from dsv4.serve.folder_tokenizer import tokenizer_of
from dsv4.serve.model import RunnerModel
from dsv4.serve.tokenizer import ByteTokenizer, Tokenizer
from dsv4.shard import Shard
from workspace import simulated

SMALL = "small"
"""The built-in model: a layer of each kind and the vocabulary of bytes, at a size for a CPU."""

HEADROOM = 1.5
"""A pool's free bytes are not always in one piece: what lives together fits with room for the pieces between."""

Tensors = Checkpoint | RandomTensors

BUILT_IN = {SMALL: attrs.evolve(MIXED, vocab_size=ByteTokenizer.vocabulary)}

PRECISIONS = {
    "float32": Precision(),
    "float32-fp8": Precision(torch.float32, Format.FP8_DS_MLA, Format.INDEXER_FP8),
    "bfloat16-fp8": SERVED,
}
"""Activations, and keys where they are not kept as such: exact, quantised caches alone, as served."""

KERNEL_WIDTHS = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
"""What the CUDA kernels are made for: the widths of the published models."""

DEVICES = ("cpu", "cuda", "simulated")
"""``simulated`` runs what is enqueued on virtual streams, graphs included, in an order that its seed picks."""


@attrs.frozen
class ModelOptions:
    """Which model, and how it is run.

    Attributes
    ----------
    model
        ``small``, ``flash``, ``pro`` or a config.json, with random weights by `weights_seed`.
    checkpoint
        Folder with config and weights, instead of `model`.
    layers, experts
        The first so many of the model; None: all.
    strategy
        Of the workspace; None: as configured.
    device
        A key of `DEVICES`; of several ranks on a host each takes a GPU of its own.
    precision
        A key of `PRECISIONS`.
    memory
        Bytes that workspace and caches may take together; None: what all requests at once need.
    drafts
        Tokens that the MTP block guesses ahead; 0: none.
    """

    model: str = SMALL
    checkpoint: Path | None = None
    layers: int | None = None
    experts: int | None = None
    weights_seed: int = 0
    strategy: str | None = None
    device: str = "cpu"
    precision: str = "float32"
    engine: Engine = Engine(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=1024)
    memory: int | None = None
    drafts: int = 0
    run: Options = Options()


@attrs.frozen(eq=False)
class Deployment:
    """A model that is ready to serve.

    Attributes
    ----------
    ranks
        This process among those that share the model.
    note
        What the user should know about the text; may be empty.
    workspace_bytes
        What the workspace holds, or, where it leaves placement to an allocator, what was declared.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    note: str
    ranks: parallel.Ranks
    workspace: Any
    model: RunnerModel
    workspace_bytes: int
    caches: tuple[Caches, ...]

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(one.nbytes for one in self.caches)


@contextmanager
def deployed(options: ModelOptions) -> Iterator[Deployment]:
    """Build what the options describe: the workspace first, then the caches in what it leaves, then the weights.

    Raises
    ------
    ModelConfigError, CheckpointError, TokenizerError
        The model is not known, not sound, or not what the folder holds.
    BudgetError
        Workspace and caches do not fit `memory`, or the weights the device's.
    RequestError
        Limits that the model cannot be run with.
    """
    simulates = options.device == "simulated"
    ranks = parallel.group("cpu" if simulates else options.device)
    device: Any = simulated.Device(memory="host", execution="deferred") if simulates else str(ranks.device)
    try:
        tensors = _tensors(options, ranks)
        _check(options, tensors.config)
        ranks.agree(tensors.config, **attrs.asdict(options, recurse=False))
        tokenizer, note = _tokenizer(options)
        with (
            workspace.create(
                options.strategy,
                device=device,
                headroom=HEADROOM,
                micro_batches=options.run.micro_batches,
                statistics=True,
            ) as ws,
            _parts(options, tensors, ranks, ws) as parts,
            device if simulates else nullcontext(),
        ):
            yield Deployment(tensors.config, tokenizer, note, ranks, ws, *parts)
    finally:
        ranks.close()


@contextmanager
def _parts(
    options: ModelOptions, tensors: Tensors, ranks: parallel.Ranks, ws: Any
) -> Iterator[tuple[RunnerModel, int, tuple[Caches, ...]]]:
    """The model, the bytes of its workspace, and its caches."""
    config, precision = tensors.config, PRECISIONS[options.precision]
    check_weights(config, precision.activations, options.drafts > 0, ranks)
    shard = Shard(config, tensor_parallel=ranks.size, rank=ranks.rank, attention="flashinfer")
    held = reserve(ws, shard, precision, options.engine, options.run, draft=options.drafts > 0)
    caches, draft_caches = _caches(options, config, precision, held, ranks.device)
    if options.memory is not None:
        ws.lock()
    assembly = Assembly(shard, precision, tensors, ranks.device)
    runner = Runner(
        ws,
        shard,
        precision,
        options.engine,
        assembly.model(),
        caches,
        options.run,
        draft=assembly.draft() if options.drafts else None,
        draft_caches=draft_caches,
        all_reduce=ranks.all_reduce,
    )
    with closing(runner):
        yield RunnerModel(runner, options.drafts), held, (*caches, *draft_caches)


def _tensors(options: ModelOptions, ranks: parallel.Ranks) -> Tensors:
    if options.checkpoint:
        return Checkpoint(options.checkpoint, options.layers, options.experts, ranks.device)
    return random_tensors(options)


def random_tensors(options: ModelOptions) -> RandomTensors:
    """Random weights of the options' model, by their seed."""
    config = reduced(resolve(options.model, BUILT_IN | PRESETS), options.layers, options.experts)
    return RandomTensors(config, options.weights_seed)


def _tokenizer(options: ModelOptions) -> tuple[Tokenizer, str]:
    if options.checkpoint:
        return tokenizer_of(options.checkpoint)
    return ByteTokenizer(), f"{options.model!r} has random weights: its text means nothing"


def _check(options: ModelOptions, config: ModelConfig) -> None:
    if options.device == "cpu" and options.run.mode != "eager":
        raise RunError(
            f"mode {options.run.mode!r} on a CPU, which has no graphs", "use mode 'eager', or device 'simulated'"
        )
    if options.device == "cuda" and not kernels.MISSING:
        _check_kernels(options, config)
    longest = options.engine.max_model_len
    if longest > config.max_position_embeddings:
        raise RequestError(
            f"max_model_len={longest} is above the model's {config.max_position_embeddings} positions",
            "lower max_model_len",
        )
    if options.drafts and not config.num_nextn_predict_layers:
        raise RequestError("the model has no MTP block to guess tokens with", "serve it without speculative decoding")


def _check_kernels(options: ModelOptions, config: ModelConfig) -> None:
    """Raise `RunError` where the CUDA kernels, which take the place of the references, were not made for the model."""
    problems = [
        f"{name}={getattr(config, name)}" for name, width in KERNEL_WIDTHS.items() if getattr(config, name) != width
    ]
    if PRECISIONS[options.precision] != SERVED:
        problems.append(f"precision {options.precision!r}")
    if problems:
        widths = ", ".join(f"{name}={width}" for name, width in KERNEL_WIDTHS.items())
        raise RunError(
            f"the CUDA kernels do not take {', '.join(problems)}; they take bfloat16 with FP8 caches, {widths}",
            "choose precision 'bfloat16-fp8' and a model of these widths, as 'flash' with fewer layers and experts; or "
            "set DSV4_KERNELS=off for the references",
        )


def _caches(
    options: ModelOptions, config: ModelConfig, precision: Precision, held: int, device: torch.device
) -> tuple[list[Caches], list[Caches]]:
    """Caches of each micro-batch, and its draft model's."""
    homes = options.run.micro_batches
    seqs = -(-options.engine.max_num_seqs // homes)
    pagings = [Paging(config, precision.storage, draft) for draft in (False, True)[: 1 + bool(options.drafts)]]
    caching = Caching(tuple(pagings), attrs.evolve(options.engine, max_num_seqs=seqs), options.drafts)
    blocks = size_caches(options.memory, held, caching, homes)
    made = [
        [Caches(config, precision.storage, own, draft=paging.draft, device=device) for _ in range(homes)]
        for paging, own in zip(pagings, blocks, strict=True)
    ]
    return made[0], made[1] if options.drafts else []
