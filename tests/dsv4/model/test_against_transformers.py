"""Logits against `DeepseekV4ForCausalLM`, which nobody here wrote: float32, the same weights, every kind of layer."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from dsv4 import ops
from dsv4.config import ModelConfig
from dsv4.model.presets import MIXED, of_ratio
from dsv4.model.random_weights import random_tensors
from dsv4.model.transformers_names import to_transformers
from tests.dsv4.model.made import decoder, full_prefill, prompt

transformers = pytest.importorskip("transformers", minversion="5.17", reason="the reference model is in transformers")

TOLERANCE = 1e-4
LENGTH = 705
"""Past five windows of 128 tokens and 176 groups of 4, of which 32 are chosen; not a multiple of either."""

CONFIGS = {
    "swa": of_ratio(0),
    "c4": of_ratio(4),
    "c128": of_ratio(128),
    "mixed": MIXED,
    "every key chosen": attrs.evolve(of_ratio(4), index_topk=256),
}
SEEDS = {"every key chosen": 1}
"""Fewer where the others cover it."""

CASES = [(name, seed) for name in CONFIGS for seed in range(SEEDS.get(name, 3))]


def reference(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> Any:
    """transformers' model with these weights; every key of its state is given, and none more."""
    names = [field.name for field in attrs.fields(ModelConfig)]
    given = {name: getattr(config, name) for name in names if name not in ("rope_scaling", "compress_ratios")}
    given["compress_ratios"] = list(config.compress_ratios[: config.num_hidden_layers])
    given["rope_scaling"] = {"rope_type": "yarn", **attrs.asdict(config.rope_scaling)}
    made = transformers.DeepseekV4Config(**given, attn_implementation="eager")
    model = transformers.DeepseekV4ForCausalLM(made).float().eval()
    model.load_state_dict(to_transformers(tensors, config), strict=True)
    return model


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


STABLE = 2e-6
"""Scores that decide a choice are further apart than this, several times the rounding of a score: with these seeds no
choice is left to the order in which a machine sums."""


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The smallest distance between the last key chosen and the first one not, for each call of the indexer."""
    plain, found = ops.indexer_top_k, []

    def watched(scores: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        chosen = out.shape[1]
        if scores.shape[1] > chosen:
            best = scores.topk(chosen + 1, 1).values[counts > chosen]
            found.append((best[:, -2] - best[:, -1]).min().item())
        return plain(scores, counts, out=out)

    monkeypatch.setattr(ops, "indexer_top_k", watched)
    return found


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_logits_are_those_of_transformers(name: str, seed: int, gaps: list[float]) -> None:
    """The largest difference over 705 positions is at most 1e-4."""
    config = CONFIGS[name]
    tensors, tokens = random_tensors(config, seed), prompt(config, LENGTH, seed)
    found = full_prefill(decoder(config, tensors=tensors), tokens)
    wanted = logits(reference(config, tensors), tokens)
    assert wanted.std() > 0.5
    assert min(gaps, default=1.0) > STABLE and bool(gaps) == (name in ("c4", "mixed"))
    assert (found - wanted).abs().max() <= TOLERANCE


CHANGES = {
    "attn.compressor.ape": "swap halves",
    "hc_attn_base": "transpose",
    "attn.attn_sink": "zero",
    "ffn.gate.bias": "zero",
    "attn.indexer.weights_proj.weight": "zero",
    "attn.kv_norm.weight": "zero",
    "ffn.gate.tid2eid": "roll",
}


@pytest.fixture(scope="module")
def mixed() -> torch.Tensor:
    """The reference's logits of the mixed model, seed 0."""
    return logits(reference(MIXED, random_tensors(MIXED, 0)), prompt(MIXED, LENGTH, 0))


@pytest.mark.parametrize("changed", CHANGES)
def test_the_comparison_notices_one_changed_tensor(changed: str, mixed: torch.Tensor) -> None:
    """Control: the same comparison fails when one layer's tensor differs, whatever its part in the model."""
    tensors, tokens = random_tensors(MIXED, 0), prompt(MIXED, LENGTH, 0)
    # The last layer that has one: the streams that enter the first layer are all alike.
    name = [name for name in tensors if name.startswith("layers.") and name.endswith(changed)][-1]
    tensors[name] = _changed(tensors[name], CHANGES[changed])
    found = full_prefill(decoder(MIXED, tensors=tensors), tokens)
    assert (found - mixed).abs().max() > 100 * TOLERANCE


def _changed(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "swap halves":
        return tensor.roll(tensor.shape[1] // 2, 1)
    if how == "transpose":
        return torch.cat((tensor[:8], tensor[8:].view(4, 4).T.flatten()))
    if how == "roll":
        return tensor.roll(1, 0)
    return torch.zeros_like(tensor)
