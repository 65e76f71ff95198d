"""What a folder holds, against what its config describes: where each tensor is, and everything that is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import attrs

from dsv4.checkpoint.errors import CheckpointError, listed
from dsv4.checkpoint.folder import Folder
from dsv4.checkpoint.names import STACKED, canonical, in_transformers, scale_of
from dsv4.checkpoint.quantised import FP4_BLOCK, fp8_scale_shape
from dsv4.config import ModelConfig
from dsv4.model.parameters import TOKEN_TABLE, Shapes, parameters

PLAIN = ("F64", "F32", "F16", "BF16")
FP8, FP4 = ("F8_E4M3",), ("I8", "U8")
BYTE_SCALES = ("F8_E8M0", "U8")
INTEGERS = ("I64", "I32")
"""Dtypes as safetensors spells them."""

_EXPERT = re.compile(r"(layers\.\d+\.)ffn\.experts\.(\d+)\.(w[123])\.weight")


@attrs.frozen
class Place:
    """Where a tensor is: its stored name, or which expert's rows of a stacked one; and the stored scales."""

    stored: str
    expert: int | None = None
    rows: slice = slice(None)
    scale: str | None = None


def places(folder: Folder, whole: ModelConfig, wanted: ModelConfig) -> dict[str, Place]:
    """Where the tensors of `wanted` are, by DeepSeek's names.

    Parameters
    ----------
    whole
        The model that the folder's config describes.
    wanted
        The same, or reduced: files that hold none of its tensors are not opened.

    Raises
    ------
    CheckpointError
        Lists the files that cannot be read; else every missing, extra, doubled and misshapen tensor, and token
        tables that name experts which the config has not.
    """
    stored: dict[str, str] = {}
    problems = []
    for name in folder.shard_of:
        known = canonical(name)
        if known in stored:
            problems.append(f"{name} is the same tensor as {stored[known]}")
        stored[known] = name
    stacked = any(name.endswith(tuple(STACKED)) for name in stored)
    expected = _stacked(parameters(whole)) if stacked else parameters(whole)
    needed = _stacked(parameters(wanted)) if stacked else parameters(wanted)
    folder.require(stored[own] for name in needed for own in (name, scale_of(name)) if own in stored)
    scales = set()
    for name in needed:
        if name not in stored:
            wanted_name = in_transformers(name) if stacked else name
            problems.append(f"{wanted_name} is missing; expected {list(expected[name])}")
            continue
        problem, scale = _compared(folder, stored, name, expected[name])
        problems += problem
        scales.add(scale)
        if name.endswith(TOKEN_TABLE) and not problem:
            problems += _table_problems(folder, stored[name], whole.n_routed_experts)
    problems += _extra(folder, stored, expected, needed, scales)
    if problems:
        raise listed(folder.path, problems, "pass the checkpoint that belongs to this config.json")
    return {name: _place(stored, name, scales, wanted) for name in parameters(wanted)}


def _compared(folder: Folder, stored: Mapping[str, str], name: str, shape: tuple[int, ...]) -> tuple[list[str], str]:
    """What is wrong with one tensor and its scales, and the scales' name ("" where it needs none)."""
    own, scale = stored[name], scale_of(name)
    found, dtype = folder.shape(own), folder.dtype(own)
    allowed: tuple[str, ...] = INTEGERS if name.endswith(TOKEN_TABLE) else PLAIN
    blocks: tuple[int, ...] = ()
    if len(shape) == 2 and dtype in FP8:
        blocks, allowed = fp8_scale_shape(*shape), FP8
    elif len(shape) == 2 and dtype in FP4:
        blocks, allowed = (shape[0], shape[1] // FP4_BLOCK), FP4
        found = (*found[:-1], *(2 * columns for columns in found[-1:]))  # two codes a byte
    problems = []
    if found != shape:
        problems.append(f"{own} is {list(found)}; expected {list(shape)}")
    if dtype not in allowed:
        problems.append(f"{own} is of dtype {dtype}; expected {' or '.join(allowed)}")
    if not blocks:
        return problems, ""
    if scale not in stored:
        problems.append(f"{scale} is missing; expected {list(blocks)}, as {own} is {dtype}")
    else:
        problems += _scale_problems(folder, stored[scale], blocks, dtype)
    return problems, scale


def _scale_problems(folder: Folder, own: str, blocks: tuple[int, ...], dtype: str) -> Iterator[str]:
    found, kind = folder.shape(own), folder.dtype(own)
    allowed = BYTE_SCALES if dtype in FP4 else (*BYTE_SCALES, *PLAIN)
    if found != blocks:
        yield f"{own} is {list(found)}; expected {list(blocks)}"
    if kind not in allowed:
        yield f"{own} is of dtype {kind}; expected {' or '.join(allowed)}"


def _table_problems(folder: Folder, own: str, experts: int) -> Iterator[str]:
    """What names an expert that is not there; read here, as a few MB are read soon."""
    least, most = (int(bound) for bound in folder.read(own).aminmax())
    if least < 0 or most >= experts:
        yield f"{own} names experts {least} to {most}; there are 0 to {experts - 1}"


def _extra(
    folder: Folder, stored: Mapping[str, str], expected: Shapes, needed: Shapes, scales: set[str]
) -> Iterator[str]:
    """Tensors that are none of the model's; those of layers and experts that are not wanted may be there."""
    left_out = expected.keys() - needed.keys()
    known = expected.keys() | scales | {scale_of(name) for name in left_out}
    for name, own in stored.items():
        if name not in known:
            yield f"{own} is extra{_shape_of(folder, own)}"


def _shape_of(folder: Folder, own: str) -> str:
    try:
        folder.require([own])
    except CheckpointError:  # in a file that nothing else is in, which need not be there
        return ""
    return f", {list(folder.shape(own))}"


def _stacked(shapes: Shapes) -> Shapes:
    """The same tensors with the experts of each layer in one, as transformers has them; MTP blocks as they are."""
    found: Shapes = {}
    for name, shape in shapes.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            found[name] = shape
            continue
        for suffix, parts in STACKED.items():
            if match[3] in parts:
                own = f"{match[1]}{suffix}"
                found[own] = int(match[2]) + 1, len(parts) * shape[0], shape[1]
    return found


def _place(stored: Mapping[str, str], name: str, scales: set[str], config: ModelConfig) -> Place:
    if name in stored:
        scale = scale_of(name)
        return Place(stored[name], scale=stored[scale] if scale in scales else None)
    match = _EXPERT.fullmatch(name)
    assert match is not None, f"{name} was neither found nor reported"
    expert, inner = int(match[2]), config.moe_intermediate_size
    if match[3] == "w2":
        return Place(stored[f"{match[1]}ffn.experts.down"], expert)
    rows = slice(0, inner) if match[3] == "w1" else slice(inner, 2 * inner)
    return Place(stored[f"{match[1]}ffn.experts.gate_up"], expert, rows)
