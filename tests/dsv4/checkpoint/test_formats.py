"""What was saved is read back, in either format, as a whole or in part, one tensor at a time."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch

from dsv4.checkpoint import Checkpoint, CheckpointError, load, save
from dsv4.checkpoint.folder import INDEX, Folder
from dsv4.config import reduced
from dsv4.model.precision import Precision
from dsv4.model.presets import MIXED
from dsv4.model.random_weights import RandomTensors, random_tensors
from dsv4.model.weights import Assembly
from dsv4.shard import Shard

FORMATS = "deepseek", "transformers"
TENSORS = random_tensors(MIXED, 0)


@pytest.mark.parametrize("shard_bytes", [10**9, 300_000])
@pytest.mark.parametrize("format", FORMATS)
def test_both_formats_give_the_same_tensors(format: str, shard_bytes: int, tmp_path: Path) -> None:
    """Every tensor bit for bit, MTP block and token tables included, from one file or many."""
    save(tmp_path, TENSORS, MIXED, format, shard_bytes=shard_bytes)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3 and (tmp_path / INDEX).exists()) if shard_bytes < 10**9 else len(files) == 1
    found = Checkpoint(tmp_path)
    assert found.config == MIXED
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_the_formats_are_told_apart_by_names_only(tmp_path: Path) -> None:
    for format in FORMATS:
        save(tmp_path / format, TENSORS, MIXED, format)
    configs = [json.loads((tmp_path / format / "config.json").read_text()) for format in FORMATS]
    assert configs[0] == configs[1]
    ours, theirs = (Folder(tmp_path / format).shard_of.keys() for format in FORMATS)
    assert {name for name in ours & theirs if not name.startswith("mtp.")} == set()


def test_a_folder_without_mtp_block_has_a_model_without(tmp_path: Path) -> None:
    save(tmp_path, {name: one for name, one in TENSORS.items() if not name.startswith("mtp.")}, MIXED)
    assert Checkpoint(tmp_path).config == attrs.evolve(MIXED, num_nextn_predict_layers=0)
    assert load(tmp_path).drafts == ()


def test_another_drafter_is_left_out(tmp_path: Path) -> None:
    """The -0731 checkpoints have one under ``mtp.*``."""
    tensors = {name: one for name, one in TENSORS.items() if not name.startswith("mtp.")}
    save(tmp_path, tensors | {"mtp.0.main_proj.weight": torch.zeros(4, 12), "mtp.2.norm.weight": torch.ones(4)}, MIXED)
    assert Checkpoint(tmp_path).config.num_nextn_predict_layers == 0


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    config = attrs.evolve(MIXED, tie_word_embeddings=True)
    save(tmp_path, RandomTensors(config, 0), config)
    assert "head.weight" not in Checkpoint(tmp_path)
    model = load(tmp_path).model
    assert model.lm_head is model.embed


@pytest.mark.parametrize("format", FORMATS)
def test_the_first_layers_and_experts(format: str, tmp_path: Path) -> None:
    """Shapes that count experts follow, token tables name experts that are there; the rest is as it was."""
    save(tmp_path, TENSORS, MIXED, format)
    found = Checkpoint(tmp_path, layers=2, experts=4)
    assert found.config == reduced(MIXED, 2, 4)
    assert found.config.compress_ratios == (0, 4, 0)
    assert found.keys() == RandomTensors(found.config, 0).keys()
    for name in found:
        whole = TENSORS[name]
        wanted = whole % 4 if name.endswith("tid2eid") else whole[:4] if ".ffn.gate." in name else whole
        assert torch.equal(found[name], wanted), name
    assert load(tmp_path, layers=2, experts=4).model.layers[1].experts.w13.shape[0] == 4


def test_files_of_other_layers_need_not_be_there(tmp_path: Path) -> None:
    """Control: without the reduction they are asked for."""
    save(tmp_path, {name: one for name, one in TENSORS.items() if not name.startswith("mtp.")}, MIXED, shard_bytes=1)
    shards = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    for name, shard in shards.items():
        if name.startswith("layers.3."):
            (tmp_path / shard).unlink()
    assert torch.equal(Checkpoint(tmp_path, layers=3)["norm.weight"], TENSORS["norm.weight"])
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(tmp_path)
    assert len(refused.value.problems) == sum(name.startswith("layers.3.") for name in shards)


@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_reads_its_share(format: str, tmp_path: Path) -> None:
    """The same slices as of the tensors in memory."""
    save(tmp_path, TENSORS, MIXED, format)
    for rank in range(2):
        shard = Shard(MIXED, tensor_parallel=2, rank=rank, attention="flashinfer")
        found, wanted = load(tmp_path, shard=shard).model, Assembly(shard, Precision(), TENSORS).model()
        assert _equal(attrs.asdict(found), attrs.asdict(wanted))
    assert not _equal(attrs.asdict(found), attrs.asdict(load(tmp_path).model))


def _equal(found: object, wanted: object) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(_equal(found[name], one) for name, one in wanted.items())
    if isinstance(wanted, tuple):
        return isinstance(found, tuple) and all(map(_equal, found, wanted))
    return found == wanted


@pytest.mark.parametrize("ranks", (1, 2))
def test_tensors_are_read_when_they_are_asked_for(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking reads token tables; loading each stored tensor, or each of the rank's experts in a stacked one, once."""
    reads: list[str] = []
    read = Folder.read

    def counted(self: Folder, stored: str, *part: object) -> torch.Tensor:
        reads.append(f"{stored}{part or ''}")
        return read(self, stored, *part)  # type: ignore[arg-type]

    monkeypatch.setattr(Folder, "read", counted)
    save(tmp_path, TENSORS, MIXED, "transformers")
    found = Checkpoint(tmp_path, layers=1)
    assert reads == ["model.layers.0.mlp.gate.tid2eid"]
    reads.clear()
    Assembly(Shard(found.config, tensor_parallel=ranks, attention="flashinfer"), Precision(), found).model()
    assert set(Counter(reads).values()) == {1}
    assert sum(".down_proj(" in name for name in reads) == MIXED.n_routed_experts // ranks
    assert not any("layers.1." in name or "mtp." in name for name in reads)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_take_the_precision_asked_for(format: str, tmp_path: Path) -> None:
    """Stored in bfloat16 but for what every checkpoint has in float32."""
    save(tmp_path, random_tensors(MIXED, 0, torch.bfloat16), MIXED, format)
    model = load(tmp_path, precision=Precision(torch.bfloat16)).model
    assert model.embed.dtype is model.layers[0].experts.w13.dtype is torch.bfloat16
    assert model.layers[0].attention.sink.dtype is torch.float32
    assert torch.equal(model.embed, TENSORS["embed.weight"].bfloat16())


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("umask", (0o022, 0o027, 0o077))
@pytest.mark.parametrize("shard_bytes", (10**9, 300_000))
def test_files_have_the_mode_of_any_new_file(umask: int, shard_bytes: int, tmp_path: Path) -> None:
    """Weights, too, which safetensors writes for their owner alone."""
    former = os.umask(umask)
    try:
        save(tmp_path / "saved", TENSORS, MIXED, shard_bytes=shard_bytes)
    finally:
        os.umask(former)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "saved").iterdir()}
    assert len(modes) == 2 if shard_bytes == 10**9 else len(modes) > 3
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_saving_says_what_it_cannot_do(tmp_path: Path) -> None:
    for given, needle in (
        ({"format": "gguf"}, "format 'gguf' is unknown"),
        ({"format": "transformers", "quantised": True}, "stacks experts unquantised"),
    ):
        with pytest.raises(CheckpointError, match=needle):
            save(tmp_path / "new", TENSORS, MIXED, **given)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="hidden_size=48 is no multiple of 32"):
        save(tmp_path / "new", {}, attrs.evolve(MIXED, hidden_size=48), quantised=True)
    assert not (tmp_path / "new").exists()
    save(tmp_path, TENSORS, MIXED)
    with pytest.raises(CheckpointError, match="has weights in it"):
        save(tmp_path, TENSORS, MIXED)
