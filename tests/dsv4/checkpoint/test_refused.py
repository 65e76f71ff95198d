"""A folder that does not hold the model of its config is one error that lists everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.checkpoint import Checkpoint, CheckpointError, load, save
from dsv4.checkpoint.errors import SHOWN
from dsv4.checkpoint.folder import INDEX
from dsv4.errors import ModelConfigError
from dsv4.model.presets import MIXED
from dsv4.model.random_weights import random_tensors
from dsv4.shard import Shard

TENSORS = random_tensors(MIXED, 0)
Tensors = dict[str, torch.Tensor]


def problems(path: Path, **given: object) -> set[str]:
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(path, **given)  # type: ignore[arg-type]
    assert refused.value.remedy
    assert all(problem in str(refused.value) for problem in refused.value.problems)
    return set(refused.value.problems)


def changed(path: Path, change: Callable[[Tensors], object], quantised: bool = False, format: str = "deepseek") -> None:
    """A saved folder, some of whose tensors were then changed."""
    save(path, TENSORS, MIXED, format, quantised=quantised)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_all_listed(tmp_path: Path) -> None:
    """With the names in the files, the shapes found and those expected."""

    def change(tensors: Tensors) -> None:
        del tensors["layers.1.attn.wkv.weight"], tensors["layers.3.ffn.gate.bias"]
        tensors["layers.4.attn_norm.weight"] = torch.ones(128)
        tensors["visual.proj"] = torch.ones(2, 3)
        tensors["embed.weight"] = torch.ones(500, 128)
        tensors["layers.0.hc_ffn_base"] = torch.ones(24, 1)
        tensors["layers.0.ffn.gate.tid2eid"] = torch.ones(512, 3)
        tensors["layers.0.attn.wq_a.weight"] = torch.ones(64, 64, dtype=torch.int32)

    changed(tmp_path, change)
    assert problems(tmp_path) == {
        "layers.1.attn.wkv.weight is missing; expected [128, 128]",
        "layers.3.ffn.gate.bias is missing; expected [8]",
        "layers.4.attn_norm.weight is extra, [128]",
        "visual.proj is extra, [2, 3]",
        "embed.weight is [500, 128]; expected [512, 128]",
        "layers.0.hc_ffn_base is [24, 1]; expected [24]",
        "layers.0.ffn.gate.tid2eid is of dtype F32; expected I64 or I32",
        "layers.0.attn.wq_a.weight is [64, 64]; expected [64, 128]",
        "layers.0.attn.wq_a.weight is of dtype I32; expected F64 or F32 or F16 or BF16",
    }


def test_problems_under_transformers_names(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.2.mlp.experts.down_proj"], tensors["lm_head.weight"]
        del tensors["model.layers.0.self_attn.sinks"]
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.ones(8, 64, 128)
        tensors["norm.weight"] = torch.ones(128)

    changed(tmp_path, change, format="transformers")
    found = problems(tmp_path)
    assert len(found) == 5
    assert {
        "model.layers.2.mlp.experts.down_proj is missing; expected [8, 128, 64]",
        "lm_head.weight is missing; expected [512, 128]",
        "model.layers.0.self_attn.sinks is missing; expected [8]",
        "model.layers.1.mlp.experts.gate_up_proj is [8, 64, 128]; expected [8, 128, 128]",
    } < found
    # Which of the two is met first, the file decides.
    assert found & {
        "norm.weight is the same tensor as model.norm.weight",
        "model.norm.weight is the same tensor as norm.weight",
    }


def test_problems_of_scales(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["layers.1.attn.wq_b.scale"]
        tensors["layers.0.attn.wkv.scale"] = torch.ones(2, 1)
        tensors["layers.2.attn.compressor.wkv.scale"] = torch.ones(1, 1)
        tensors["layers.0.ffn.experts.1.w1.scale"] = torch.ones(64, 4)
        tensors["layers.0.ffn.experts.2.w1.weight"] = torch.zeros(64, 128, dtype=torch.int8)
        tensors["layers.0.ffn.experts.3.w1.weight"] = torch.zeros((), dtype=torch.int8)
        tensors["layers.0.attn.q_norm.weight"] = torch.zeros(64, dtype=torch.int8)

    changed(tmp_path, change, quantised=True)
    assert problems(tmp_path) == {
        "layers.1.attn.wq_b.scale is missing; expected [8, 1], as layers.1.attn.wq_b.weight is F8_E4M3",
        "layers.0.attn.wkv.scale is [2, 1]; expected [1, 1]",
        "layers.2.attn.compressor.wkv.scale is extra, [1, 1]",
        "layers.0.ffn.experts.1.w1.scale is of dtype F32; expected F8_E8M0 or U8",
        "layers.0.ffn.experts.2.w1.weight is [64, 256]; expected [64, 128]",
        "layers.0.ffn.experts.3.w1.weight is []; expected [64, 128]",
        "layers.0.attn.q_norm.weight is of dtype I8; expected F64 or F32 or F16 or BF16",
    }


def test_half_an_mtp_block_is_no_block(tmp_path: Path) -> None:
    changed(tmp_path, lambda tensors: tensors.pop("mtp.0.enorm.weight"))
    assert problems(tmp_path) == {"mtp.0.enorm.weight is missing; expected [128]"}


def test_a_long_list_is_cut_in_the_message_only(tmp_path: Path) -> None:
    """Tensors of a model with other sizes: nearly all of them are wrong."""
    small = attrs.evolve(MIXED, hidden_size=64)
    save(tmp_path, random_tensors(small, 0), small)
    keys = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="and [0-9]+ more") as refused:
        Checkpoint(tmp_path)
    assert len(refused.value.problems) > SHOWN
    assert str(refused.value).count("\n  - ") == SHOWN


@pytest.mark.parametrize("cut", [0, 5, 2000, -1])
def test_a_truncated_file(cut: int, tmp_path: Path) -> None:
    save(tmp_path, TENSORS, MIXED)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    assert any("model.safetensors is no whole safetensors file" in one for one in problems(tmp_path))


def test_damaged_and_missing_shards_are_listed_together(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, MIXED, shard_bytes=600_000)
    shards = sorted(one.name for one in tmp_path.glob("*.safetensors"))
    (tmp_path / shards[0]).unlink()
    (tmp_path / shards[1]).write_bytes(b"{" * 100)
    names = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    lost = next(name for name, shard in names.items() if shard == shards[2])
    held = load_file(tmp_path / shards[2])
    del held[lost]
    save_file(held, tmp_path / shards[2])
    found = problems(tmp_path)
    assert len(found) == 3
    for needle in (f"{shards[0]} cannot be read", f"{shards[1]} is no whole", f"{shards[2]} lacks {lost}, which the"):
        assert any(one.startswith(needle) for one in found), needle


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("", "is no index of shards"),
        ("[]", "is no index of shards"),
        ('{"metadata": {}}', "is no index of shards"),
        ('{"weight_map": ["a"]}', "is no index of shards"),
        ('{"weight_map": ' * 100_000, "is no index of shards"),
        ('{"weight_map": {"a": ""}}', "the index names '' as a file"),
        ('{"weight_map": {"a": "."}}', "the index names '.' as a file"),
        ('{"weight_map": {"a": ".."}}', "the index names '..' as a file"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "'../b.safetensors', outside the folder"),
    ],
    ids=lambda text: text[:40],
)
def test_a_broken_index(text: str, needle: str, tmp_path: Path) -> None:
    save(tmp_path, TENSORS, MIXED, shard_bytes=600_000)
    (tmp_path / INDEX).write_text(text)
    assert any(needle in one for one in problems(tmp_path))


def test_a_directory_in_a_shards_place(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, MIXED, shard_bytes=600_000)
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    shard.mkdir()
    assert problems(tmp_path) == {f"{shard.name} is a directory, not a safetensors file"}


@pytest.mark.parametrize("given", ({}, {"experts": 4}), ids=str)
@pytest.mark.parametrize(("value", "range"), ((8, "0 to 8"), (-1, "-1 to 7"), (2**40, f"0 to {2**40}")))
def test_a_token_table_names_experts_that_are_there(
    value: int, range: str, given: dict[str, int], tmp_path: Path
) -> None:
    """Of the file's, beside whatever else is wrong, and whether the model is reduced or not."""

    def change(tensors: Tensors) -> None:
        tensors["layers.0.ffn.gate.tid2eid"][:8, 0] = torch.arange(8)
        tensors["layers.0.ffn.gate.tid2eid"][9, 2] = value
        tensors["visual.proj"] = torch.ones(2, 3)

    changed(tmp_path, change)
    assert problems(tmp_path, **given) == {
        f"layers.0.ffn.gate.tid2eid names experts {range}; there are 0 to 7",
        "visual.proj is extra, [2, 3]",
    }


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("name", ("layers.1.attn.wkv.weight", "layers.3.ffn.gate.bias", "norm.weight"))
def test_a_weight_that_is_not_finite_is_named_when_it_is_read(name: str, value: float, tmp_path: Path) -> None:
    """What is not read is not looked at: a model of fewer layers loads."""
    changed(tmp_path, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(CheckpointError, match=f"^{name} has values that are not finite: .*{value}") as refused:
        load(tmp_path)
    assert refused.value.remedy
    if name != "norm.weight":
        load(tmp_path, layers=1)


def test_a_scale_that_is_not_finite_is_seen_in_the_weights(tmp_path: Path) -> None:
    """Byte 255 of a UE8M0 scale is NaN."""

    def change(tensors: Tensors) -> None:
        tensors["layers.2.ffn.experts.1.w1.scale"].view(torch.uint8)[3, 1] = 255

    changed(tmp_path, change, quantised=True)
    with pytest.raises(CheckpointError, match=r"^layers.2.ffn.experts.1.w1.weight has values .* nan to nan"):
        load(tmp_path)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert problems(tmp_path / "absent") == {f"{tmp_path / 'absent'} is no folder"}
    with pytest.raises(ModelConfigError, match="No such file"):
        Checkpoint(tmp_path)
    save(tmp_path, TENSORS, MIXED, shard_bytes=600_000)
    (tmp_path / INDEX).unlink()
    assert any(f".safetensors files and no {INDEX}" in one for one in problems(tmp_path))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert any("has no .safetensors file" in one for one in problems(tmp_path))


def test_another_familys_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, MIXED)
    keys = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ModelConfigError, match="model_type 'deepseek_v3'"):
        Checkpoint(tmp_path)


def test_more_layers_or_experts_than_there_are(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, MIXED)
    with pytest.raises(ModelConfigError, match="layers=5 of a model that has 4") as refused:
        Checkpoint(tmp_path, layers=5, experts=0)
    assert len(refused.value.problems) == 2
    with pytest.raises(ModelConfigError, match="experts=2 of a model that has 8, and sends each token to 3"):
        Checkpoint(tmp_path, experts=2)


def test_a_shard_of_another_config(tmp_path: Path) -> None:
    save(tmp_path, TENSORS, MIXED)
    other = Shard(attrs.evolve(MIXED, index_topk=8, hc_eps=1e-5), attention="flashinfer")
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path, shard=other)
    assert set(refused.value.problems) == {
        "index_topk is 32 in the folder, and 8 was asked for",
        "hc_eps is 1e-06 in the folder, and 1e-05 was asked for",
    }
