"""Folders that transformers wrote, and what transformers reads of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from dsv4.checkpoint import Checkpoint, save
from dsv4.model.presets import MIXED
from dsv4.model.random_weights import random_tensors
from dsv4.model.transformers_names import to_transformers
from tests.dsv4.model.made import decoder, full_prefill, prompt

transformers = pytest.importorskip("transformers", minversion="5.17", reason="the reference model is in transformers")

TENSORS = random_tensors(MIXED, 0)
TOLERANCE = 1e-4
LENGTH = 140


@pytest.fixture(scope="module")
def reference() -> Any:
    from tests.dsv4.model.test_against_transformers import reference as model_of

    return model_of(MIXED, TENSORS)


@pytest.mark.parametrize("shard_size", ["1GB", "300KB"])
@pytest.mark.parametrize("original_names", [True, False])
def test_a_model_that_transformers_saved(original_names: bool, shard_size: str, reference: Any, tmp_path: Path) -> None:
    """In the names it writes by default, and in those of its state dict: the tensors bit for bit, none left over."""
    reference.save_pretrained(tmp_path, save_original_format=original_names, max_shard_size=shard_size)
    files = len(list(tmp_path.glob("*.safetensors")))
    assert files == 1 if shard_size == "1GB" else files > 3
    found = Checkpoint(tmp_path)
    wanted = attrs.evolve(MIXED, num_nextn_predict_layers=0, compress_ratios=MIXED.compress_ratios[:4])
    assert found.config == wanted
    assert found.keys() == {name for name in TENSORS if not name.startswith("mtp.")}
    assert all(torch.equal(found[name], TENSORS[name]) for name in found)


def test_its_logits_are_those_of_transformers(reference: Any, tmp_path: Path) -> None:
    """From its folder to logits, float32, a prompt past the sliding window and a group of 128."""
    reference.save_pretrained(tmp_path)
    tokens, checkpoint = prompt(MIXED, LENGTH), Checkpoint(tmp_path)
    found = full_prefill(decoder(checkpoint.config, tensors=checkpoint, capacity=256), tokens)
    with torch.no_grad():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert wanted.std() > 0.5
    assert (found - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("format", ["transformers", "deepseek"])
def test_transformers_reads_what_we_saved(format: str, tmp_path: Path) -> None:
    """Every key of its state, and none more; the config's keys included."""
    save(tmp_path, TENSORS, MIXED, format)
    model, report = transformers.DeepseekV4ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    state, wanted = model.state_dict(), to_transformers(TENSORS, MIXED)
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], one) for name, one in wanted.items())
    assert model.config.layer_types[:2] == ["sliding_attention", "compressed_sparse_attention"]
    assert model.config.rope_parameters["compress"]["factor"] == 16.0
