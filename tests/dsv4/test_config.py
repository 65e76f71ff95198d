"""The published configs load, and an impossible one is refused with everything that is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import attrs
import pytest

from dsv4.config import LayerKind, ModelConfig, RopeScaling, reduced
from dsv4.configfile import from_keys, load, resolve
from dsv4.errors import ModelConfigError
from dsv4.presets import FLASH, PRO
from workspace.errors import ConfigError


def keys(config: ModelConfig, **changes: object) -> dict[str, object]:
    """The config as its config.json spells it, with the keys a real file has besides."""
    found = attrs.asdict(config)
    found["compress_ratios"] = list(config.compress_ratios)
    found["rope_scaling"] = {**attrs.asdict(RopeScaling()), "type": "yarn"}
    found |= {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "torch_dtype": "bfloat16",
    }
    found |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    return {name: value for name, value in (found | changes).items() if value is not ...}


def problems(**changes: object) -> tuple[str, ...]:
    with pytest.raises(ModelConfigError) as refused:
        from_keys(keys(FLASH, **changes))
    return refused.value.problems


def test_the_layer_census_of_flash_and_pro() -> None:
    """dsv4.md section 1: 2 SWA + 21 C4 + 20 C128, and 30 C4 + 31 C128."""
    assert Counter(FLASH.layer_kinds) == {LayerKind.SWA: 2, LayerKind.C4: 21, LayerKind.C128: 20}
    assert Counter(PRO.layer_kinds) == {LayerKind.C4: 30, LayerKind.C128: 31}
    assert [i for i, kind in enumerate(FLASH.layer_kinds) if kind is LayerKind.C4] == list(range(2, 43, 2))
    assert [i for i, kind in enumerate(PRO.layer_kinds) if kind is LayerKind.C4] == list(range(2, 61, 2))


@pytest.mark.parametrize("preset", [FLASH, PRO])
def test_a_published_file_gives_the_preset(preset: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(keys(preset)))
    assert load(tmp_path / "config.json") == preset
    assert load(tmp_path) == preset
    assert resolve(str(tmp_path / "config.json")) == preset


def test_ratios_beyond_the_layers_are_mtp_padding() -> None:
    """The -0731 file has 46 entries for 43 layers."""
    config = from_keys(keys(FLASH, compress_ratios=[0, 0, *[4, 128] * 20, 4, 0, 0, 0]))
    assert config.layer_kinds == FLASH.layer_kinds


def test_the_spelling_of_transformers_means_the_same() -> None:
    word = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    plain = keys(
        FLASH,
        compress_ratios=...,
        num_hash_layers=...,
        qk_rope_head_dim=...,
        topk_method=...,
        rope_scaling=...,
        layer_types=[word[ratio] for ratio in FLASH.compress_ratios[:43]],
        mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 40,
        partial_rotary_factor=0.125,
        rope_parameters={
            "main": {"rope_type": "default"},
            "compress": {"rope_type": "yarn", **attrs.asdict(RopeScaling())},
        },
    )
    assert from_keys(plain) == attrs.evolve(FLASH, compress_ratios=FLASH.compress_ratios[:43])
    plain["rope_parameters"] = {"main": {"rope_type": "default"}, "compress": {"rope_type": "default"}}
    assert from_keys(plain).rope_scaling is None


def test_one_error_lists_every_problem() -> None:
    found = problems(
        num_attention_heads=60,
        head_dim="512",
        hidden_size=...,
        index_topk=True,
        compress_ratios=[0] * 42 + [64],
    )
    assert sorted(found) == sorted(
        [
            "hidden_size is missing",
            "head_dim must be int, not '512'",
            "index_topk must be int, not True",
            "compress_ratios[42] is 64; it must be 0 (which vLLM turns to 1), 4 or 128",
            "num_attention_heads=60 is not divisible by o_groups=8",
        ]
    )


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"compress_ratios": [4] * 42}, "42 entries for num_hidden_layers=43"),
        ({"compress_ratios": [1] * 43}, "compress_ratios[0] is 1"),
        ({"compress_ratios": "4"}, "must be a list of integers"),
        ({"num_key_value_heads": 8}, "one latent K=V head"),
        ({"qk_rope_head_dim": 63}, "is odd"),
        ({"qk_rope_head_dim": 256}, "index_head_dim=128 is below qk_rope_head_dim=256"),
        ({"num_experts_per_tok": 300}, "above n_routed_experts=256"),
        ({"num_hash_layers": 44}, "above num_hidden_layers=43"),
        ({"vocab_size": 1}, "eos_token_id=1 is outside the vocabulary of 1"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be above 0"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor must be a finite number"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number, not inf"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit must be a finite number, not nan"),
        ({"hc_eps": True}, "hc_eps must be a finite number, not True"),
        ({"o_groups": 0}, "o_groups is 0; it must be above 0"),
        ({"compress_ratios": [4.0] * 43}, "must be a list of integers"),
        ({"expert_dtype": "int4"}, "one of fp4, fp8"),
        ({"rope_scaling": {"type": "linear"}}, "type 'linear'"),
        ({"rope_scaling": {"factor": 0}}, "rope_scaling .factor is 0"),
        ({"rope_scaling": 16}, "YaRN parameters"),
        ({"hidden_size": ..., "hidden_sizes": 4096}, "hidden_size is missing (there is 'hidden_sizes')"),
        ({"compress_ratios": ..., "layer_types": ["full_attention"]}, "layer_types holds 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 43}, "layer_types mean compress_ratios [0, 0, 0"),
        (
            {"compress_rates": {"compressed_sparse_attention": 8}},
            "has 8 for 'compressed_sparse_attention'; it must be 4",
        ),
        ({"compress_rates": {"full_attention": 4}}, "has 4 for 'full_attention'; it must be absent"),
        ({"num_hash_layers": ..., "mlp_layer_types": ["moe", "hash_moe"]}, "'hash_moe' for the first layers, then"),
        ({"num_hash_layers": ..., "mlp_layer_types": ["dense", "moe"]}, "'hash_moe' for the first layers, then"),
        ({"mlp_layer_types": ["hash_moe"] * 2}, "has 2 of 'hash_moe', and num_hash_layers is 3"),
        ({"rope_parameters": {"main": {"rope_type": "yarn"}}}, "rope_parameters.main is of type 'yarn'"),
        ({"layer_types": [{}] * 43, "mlp_layer_types": [[]]}, "'hash_moe' for the first layers, then"),
        ({"layer_types": {"a": 1}}, "layer_types must be a list, not {'a': 1}"),
        ({"compress_ratios": ..., "layer_types": {"a": 1}}, "layer_types must be a list, not {'a': 1}"),
        ({"mlp_layer_types": {"a": 1}}, "mlp_layer_types must be a list, not {'a': 1}"),
        ({"compress_rates": [4]}, "compress_rates must be an object, not [4]"),
        ({"num_nextn_predict_layers": 10**7}, "num_nextn_predict_layers is 10000000; it must be 16 or less"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be 512 or less"),
        ({"n_routed_experts": 10**7}, "n_routed_experts is 10000000; it must be 2048 or less"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; it must be 16777216 or less"),
        ({"hidden_size": 2**20 + 1}, "hidden_size is 1048577; it must be 1048576 or less"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number"),
        ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor is inf; it must be above 0, and 1 or less"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 of head_dim=512 is not qk_rope_head_dim=64"),
    ],
)
def test_each_rule_names_value_and_rule(changes: dict[str, object], needle: str) -> None:
    assert any(needle in problem for problem in problems(**changes)), problems(**changes)


def test_a_reduced_model_keeps_the_shapes_of_attention() -> None:
    """Four layers of Flash are of all three kinds; the MTP block's ratio stays behind them."""
    small = reduced(FLASH, layers=4, experts=8)
    assert small.compress_ratios == (0, 0, 4, 128, 0)
    assert (small.num_hidden_layers, small.n_routed_experts, small.num_hash_layers) == (4, 8, 3)
    same = {"compress_ratios", "num_hidden_layers", "n_routed_experts"}
    kept = {name: value for name, value in attrs.asdict(small).items() if name not in same}
    assert kept == {name: value for name, value in attrs.asdict(FLASH).items() if name not in same}
    assert reduced(FLASH, layers=2).num_hash_layers == 2
    assert reduced(FLASH) == FLASH


@pytest.mark.parametrize("wanted", [{"layers": 0}, {"layers": 44}, {"experts": 257}, {"experts": 6.0}])
def test_more_than_there_is_cannot_be_left(wanted: dict[str, int]) -> None:
    with pytest.raises(ModelConfigError, match=f"{next(iter(wanted))}=.* of a model that has (43|256)"):
        reduced(FLASH, **wanted)


def test_a_token_needs_its_experts() -> None:
    """The remedy names the options and what each may be; six experts are enough."""
    with pytest.raises(ModelConfigError, match="experts=4 .* each token to 6; it must be 6 to 256") as refused:
        reduced(FLASH, layers=99, experts=4)
    assert len(refused.value.problems) == 2
    assert "--layers from 1 to 43 and --experts from 6 to 256" in refused.value.remedy
    assert reduced(FLASH, experts=6).n_routed_experts == 6


def test_the_largest_sizes_are_taken() -> None:
    """A bound is the last value that is taken."""
    assert attrs.evolve(FLASH, n_routed_experts=2048, num_nextn_predict_layers=16, hidden_size=2**20)


def test_a_config_built_by_hand_is_checked_too() -> None:
    with pytest.raises(ModelConfigError, match="not divisible by o_groups=7"):
        attrs.evolve(FLASH, o_groups=7)


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", '{"model_type": "deepseek_v3"}', "{}", "[" * 100_000, '{"a": ' * 100_000],
    ids=lambda text: text[:12],
)
def test_a_foreign_file_is_a_typed_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelConfigError) as refused:
        load(file)
    assert isinstance(refused.value, ConfigError)
    assert refused.value.remedy


def test_an_unknown_model_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="did you mean 'flash'"):
        resolve("flahs")
    with pytest.raises(ModelConfigError, match="No such file"):
        load(tmp_path / "absent.json")
