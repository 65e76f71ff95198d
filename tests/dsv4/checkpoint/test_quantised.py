"""FP8 and FP4 on disk, against decoders written here from the formats' definitions, bit by bit."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dsv4.checkpoint import Checkpoint, save
from dsv4.checkpoint.quantised import E8M0, from_fp4, from_fp8, scales, to_fp8
from dsv4.model.presets import MIXED
from dsv4.model.random_weights import random_tensors

TENSORS = random_tensors(MIXED, 0)


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN, there is no infinity."""
    sign, power, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if power == 0 else math.ldexp(8 + mantissa, power - 10))


def e2m1(code: int) -> float:
    """Sign, 2 bits of exponent with bias 1, 1 of mantissa."""
    sign, power, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if power == 0 else math.ldexp(2 + mantissa, power - 2))


def bytes_of(tensor: torch.Tensor) -> list[list[int]]:
    return tensor.view(torch.uint8).tolist()


def scale_values(stored: torch.Tensor) -> list[list[float]]:
    if stored.dtype is torch.float32:
        return stored.tolist()
    return [[math.ldexp(1.0, byte - 127) for byte in row] for row in bytes_of(stored)]


def decoded(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64, element by element."""
    factors, fp4 = scale_values(scale), weight.dtype is not torch.float8_e4m3fn
    rows = []
    for row, codes in enumerate(bytes_of(weight)):
        if fp4:
            values = [e2m1(code) for byte in codes for code in (byte & 15, byte >> 4)]
            rows.append([value * factors[row][column // 32] for column, value in enumerate(values)])
        else:
            rows.append([e4m3(code) * factors[row // 128][column // 128] for column, code in enumerate(codes)])
    return torch.tensor(rows, dtype=torch.float64)


CHECKED = {
    "layers.1.attn.wq_b.weight": torch.float8_e4m3fn,  # 1024 x 64: blocks are cut off
    "layers.0.attn.wo_a.weight": torch.float8_e4m3fn,
    "mtp.0.e_proj.weight": torch.float8_e4m3fn,
    "layers.2.ffn.shared_experts.w2.weight": torch.float8_e4m3fn,
    "layers.3.ffn.experts.5.w3.weight": torch.int8,
    "mtp.0.ffn.experts.7.w2.weight": torch.int8,
}


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_a_quantised_checkpoint_is_dequantised_on_load(expert_dtype: str, tmp_path: Path) -> None:
    """Every value is that of an independent decoder; what the published checkpoints leave unquantised is as it was."""
    config = attrs.evolve(MIXED, expert_dtype=expert_dtype)
    save(tmp_path, TENSORS, config, quantised=True)
    stored, found = load_file(tmp_path / "model.safetensors"), Checkpoint(tmp_path)
    for name, dtype in CHECKED.items():
        scale = stored[name.removesuffix("weight") + "scale"]
        assert stored[name].dtype is (dtype if expert_dtype == "fp4" else torch.float8_e4m3fn)
        assert scale.dtype is (E8M0 if expert_dtype == "fp4" else torch.float32)
        assert torch.equal(found[name].double(), decoded(stored[name], scale).float().double()), name
        assert not torch.equal(found[name], TENSORS[name])
    for name in ("embed.weight", "layers.1.attn.compressor.wkv.weight", "layers.1.attn.indexer.weights_proj.weight"):
        assert torch.equal(found[name], TENSORS[name])


def test_scales_are_stored_a_block() -> None:
    """[ceil(out/128), ceil(in/128)] of FP8; FP4 is checked where it is decoded."""
    assert to_fp8(torch.ones(300, 129), wide_scales=False)[1].shape == (3, 2)


def test_quantised_values_are_the_nearest_codes(tmp_path: Path) -> None:
    """Off by half a step of the format at most: 1/16 of the value for FP8, 1/4 for FP4, and less near zero."""
    save(tmp_path, TENSORS, MIXED, quantised=True)
    found = Checkpoint(tmp_path)
    for name, dtype in CHECKED.items():
        off, size = (found[name] - TENSORS[name]).abs(), TENSORS[name].abs()
        share, floor = (1 / 16, 2**-10) if dtype is torch.float8_e4m3fn else (1 / 4, 0.25)
        assert (off <= size * share + size.amax() * floor).all(), name
        assert off.any()


def test_every_scale_byte() -> None:
    """2**(b - 127), subnormal at 0; 255 is NaN."""
    every = torch.arange(256, dtype=torch.uint8)
    for stored in (every, every.view(E8M0)):
        found = scales(stored).double()
        assert found[:255].tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]
        assert found[255].isnan()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_the_even_column_is_in_the_low_nibble(dtype: torch.dtype) -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0], packed[0, 15] = 0x92, 0x70
    found = from_fp4(packed.view(dtype), torch.tensor([[128]], dtype=torch.uint8))
    assert found[0, :2].tolist() == [2.0, -1.0] and found[0, 30:].tolist() == [0.0, 12.0]
    assert not found[0, 2:30].any()


def test_edges_of_fp8_blocks() -> None:
    """A block of zeros, the largest value of a block, and one of a subnormal code; blocks do not see each other."""
    weight = torch.zeros(130, 256)
    weight[0, 0], weight[0, 1], weight[129, 255] = 448.0 * 2**10, 2.0, -3e-5
    for wide in (False, True):
        codes, stored = to_fp8(weight, wide_scales=wide)
        found = from_fp8(codes, stored)
        assert found[0, 0] == weight[0, 0] and found[0, 1] == 2.0
        assert abs(found[129, 255] + 3e-5) <= 3e-5 / 16
        assert found.count_nonzero() == 3 and found.isfinite().all()


def test_scales_in_plain_bytes_and_under_transformers_name(tmp_path: Path) -> None:
    """A converter's spelling of the same checkpoint: uint8 scales, ``weight_scale_inv``."""
    save(tmp_path / "ours", TENSORS, MIXED, quantised=True)
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    renamed = {}
    for name, tensor in stored.items():
        if tensor.dtype is E8M0:
            name, tensor = name.removesuffix("scale") + "weight_scale_inv", tensor.view(torch.uint8)
        renamed[name] = tensor
    (tmp_path / "theirs").mkdir()
    save_file(renamed, tmp_path / "theirs" / "model.safetensors")
    (tmp_path / "theirs" / "config.json").write_bytes((tmp_path / "ours" / "config.json").read_bytes())
    ours, theirs = Checkpoint(tmp_path / "ours"), Checkpoint(tmp_path / "theirs")
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        assert "layers.0.attn.wkv.weight_scale_inv" in file.keys()
