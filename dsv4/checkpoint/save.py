"""Writing a checkpoint folder, in either format."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch
from safetensors.torch import save_file

from dsv4.cache.quantise import quantise_fp4
from dsv4.checkpoint.errors import CheckpointError
from dsv4.checkpoint.folder import INDEX
from dsv4.checkpoint.names import scale_of
from dsv4.checkpoint.quantised import E8M0, FP4_BLOCK, to_fp8
from dsv4.config import ModelConfig
from dsv4.configfile import MODEL_TYPE
from dsv4.model.transformers_names import translated

SHARD_BYTES = 5_000_000_000

QUANTISED = tuple(
    f".{name}.weight"
    for name in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b", "indexer.wq_b", "e_proj", "h_proj", "w1", "w2", "w3")
)
"""Matrices that the published checkpoints quantise; those of a compressor they do not."""

Named = Iterator[tuple[str, torch.Tensor]]


def save(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    config: ModelConfig,
    format: str = "deepseek",
    *,
    quantised: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``config.json`` and safetensors, one file, or several with their index.

    Parameters
    ----------
    path
        A folder without weights; made if it is not there.
    tensors
        Under DeepSeek's names, in the dtypes they are to have. One file's are in memory at a time.
    format
        Whose tensor names: ``"deepseek"`` or ``"transformers"``, which ignores MTP blocks and finds them under
        DeepSeek's names.
    quantised
        FP8 matrices in blocks of 128 x 128 and experts as `ModelConfig.expert_dtype` says: ``"fp4"`` with UE8M0
        scales, or ``"fp8"`` with fp32 scales everywhere. Only under DeepSeek's names.
    shard_bytes
        Begin another file before one grows beyond this.

    Raises
    ------
    CheckpointError
        The format is unknown or has no quantised form, FP4 does not fit the experts' shapes, or the folder has
        weights in it.
    """
    folder = Path(path)
    if format not in ("deepseek", "transformers"):
        raise CheckpointError(f"format {format!r} is unknown", "choose 'deepseek' or 'transformers'")
    if quantised and format == "transformers":
        raise CheckpointError("format 'transformers' stacks experts unquantised", "quantise in format 'deepseek'")
    if quantised and config.expert_dtype == "fp4":
        _check_fp4(config)
    if any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has weights in it", "save to another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_keys(config), indent=2), encoding="utf-8")
    named = _in_transformers_names(tensors, config) if format == "transformers" else iter(tensors.items())
    _write(folder, _quantised(named, config) if quantised else named, shard_bytes)


def _check_fp4(config: ModelConfig) -> None:
    for name in ("hidden_size", "moe_intermediate_size"):
        width = getattr(config, name)
        if width % FP4_BLOCK:
            raise CheckpointError(
                f"{name}={width} is no multiple of {FP4_BLOCK}, which share a scale in FP4",
                "set expert_dtype to 'fp8', or save unquantised",
            )


def _keys(config: ModelConfig) -> dict[str, object]:
    keys = attrs.asdict(config) | {"model_type": MODEL_TYPE, "architectures": ["DeepseekV4ForCausalLM"]}
    if config.rope_scaling is not None:
        # transformers reads the one spelling of the type, DeepSeek's code the other.
        keys["rope_scaling"] = {"type": "yarn", "rope_type": "yarn", **attrs.asdict(config.rope_scaling)}
    return keys


def _in_transformers_names(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> Named:
    yield from translated(tensors, config)
    yield from ((name, tensors[name]) for name in tensors if name.startswith("mtp."))


def _quantised(named: Named, config: ModelConfig) -> Named:
    wide_scales = config.expert_dtype == "fp8"
    for name, tensor in named:
        if not name.endswith(QUANTISED) or "compressor." in name:
            yield name, tensor
        elif ".ffn.experts." in name and config.expert_dtype == "fp4":
            codes, scales = quantise_fp4(tensor.float(), FP4_BLOCK)
            yield name, codes.view(torch.int8)
            yield scale_of(name), scales.view(E8M0)
        else:
            codes, scales = to_fp8(tensor, wide_scales=wide_scales)
            yield name, codes
            yield scale_of(name), scales


def _write(folder: Path, named: Named, shard_bytes: int) -> None:
    files: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in named:
        if part and size + tensor.nbytes > shard_bytes:
            files.append(_flush(folder, part, len(files)))
            part, size = {}, 0
        part[name] = tensor.contiguous()
        size += tensor.nbytes
    files.append(_flush(folder, part, len(files)))
    _name_files(folder, files)


def _flush(folder: Path, part: dict[str, torch.Tensor], number: int) -> list[str]:
    file = folder / f"part-{number}.safetensors"
    mode = _mode_of_new(file)
    save_file(part, file, {"format": "pt"})
    file.chmod(mode)  # it renames a temporary file, which is its owner's alone
    return list(part)


def _mode_of_new(file: Path) -> int:
    """What any file made there gets; the process's umask cannot be asked without setting it for all threads."""
    file.touch(exist_ok=False)
    try:
        return stat.S_IMODE(file.stat().st_mode)
    finally:
        file.unlink()


def _name_files(folder: Path, files: list[list[str]]) -> None:
    """The final names say how many files there are, which is known at the end only."""
    if len(files) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    shards: dict[str, str] = {}
    for number, names in enumerate(files):
        shard = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"part-{number}.safetensors").rename(folder / shard)
        shards |= dict.fromkeys(names, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}, indent=2), encoding="utf-8")
