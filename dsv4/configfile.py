"""Reading a ``config.json`` of the family, in DeepSeek's own spelling or in that of transformers."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from dsv4.config import CHOICES, FIELDS, MOST, REQUIRED, ModelConfig, RopeScaling, check
from dsv4.errors import ModelConfigError, listed
from dsv4.presets import PRESETS

MODEL_TYPE = "deepseek_v4"

# What transformers 5.17 writes instead of compress_ratios (configuration_deepseek_v4.py).
RATIO_OF_LAYER_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


def resolve(model: str, known: Mapping[str, ModelConfig] = PRESETS) -> ModelConfig:
    """The config of that name among those known, or the one in that file.

    Raises `ModelConfigError` when it is neither.
    """
    if model in known:
        return known[model]
    if os.path.exists(model):
        return load(model)
    near = difflib.get_close_matches(model, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ModelConfigError(
        f"model {model!r} is neither a preset nor a file",
        f"{hint}pass {', '.join(known)} or a config.json",
        model=model,
    )


def load(path: str | Path) -> ModelConfig:
    """Read a ``config.json``, or the one in a checkpoint folder.

    Keys that say nothing about shapes or numerics (``torch_dtype``, ...) are ignored.

    Raises
    ------
    ModelConfigError
        The file cannot be read, is not JSON, is another model's, or has missing or
        bad values; all are listed.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{file}: {error.strerror}", "pass a readable config.json", path=str(file)) from error
    except RecursionError as error:
        raise ModelConfigError(
            f"{file} is nested too deeply to be read", "pass the model's config.json", path=str(file)
        ) from error
    except ValueError as error:
        raise ModelConfigError(
            f"{file} is not JSON: {error}", "pass the model's config.json", path=str(file)
        ) from error
    return from_keys(keys, str(file))


def from_keys(keys: object, source: str = "the config") -> ModelConfig:
    """A config from the parsed keys of a ``config.json``; see `load`."""
    if not isinstance(keys, dict):
        raise ModelConfigError(f"{source} holds {type(keys).__name__}, not an object", "pass the model's config.json")
    found = keys.get("model_type", MODEL_TYPE)
    if found != MODEL_TYPE:
        raise ModelConfigError(
            f"{source} is of model_type {found!r}",
            f"this package runs {MODEL_TYPE!r} models only",
            model_type=found,
        )
    problems = list(_contradictions(keys))
    values = dict(_translate(keys, problems))
    problems += _missing(values, keys)
    problems += check(values)
    if problems:
        raise listed(source, problems)
    return ModelConfig(**values)


def _missing(values: Mapping[str, Any], keys: Mapping[str, Any]) -> Iterator[str]:
    strangers = [key for key in keys if key not in FIELDS]
    for name in REQUIRED:
        if name not in values:
            near = difflib.get_close_matches(name, strangers, n=1, cutoff=0.8)
            yield f"{name} is missing" + (f" (there is {near[0]!r})" if near else "")


def _contradictions(keys: Mapping[str, Any]) -> Iterator[str]:
    """What one spelling says and the other denies, and what only transformers' spelling can say."""
    for name, kind in (("layer_types", list), ("mlp_layer_types", list), ("compress_rates", dict)):
        if keys.get(name) is not None and not isinstance(keys[name], kind):
            yield f"{name} must be {'a list' if kind is list else 'an object'}, not {keys[name]!r}"
    types, ratios = keys.get("layer_types"), keys.get("compress_ratios")
    if isinstance(types, list) and isinstance(ratios, list):
        said = [RATIO_OF_LAYER_TYPE.get(str(one)) for one in types]
        if said != ratios[: len(said)]:
            yield f"layer_types mean compress_ratios {said}, which are given as {ratios}"
    rates = keys.get("compress_rates")
    for kind, rate in rates.items() if isinstance(rates, dict) else ():
        if RATIO_OF_LAYER_TYPE.get(kind) != rate:
            yield f"compress_rates has {rate!r} for {kind!r}; it must be {RATIO_OF_LAYER_TYPE.get(kind, 'absent')}"
    routing = keys.get("mlp_layer_types")
    if isinstance(routing, list):
        hashed = routing.count("hash_moe")
        if routing[:hashed] != ["hash_moe"] * hashed or any(one != "moe" for one in routing[hashed:]):
            yield f"mlp_layer_types is {routing}; it must be 'hash_moe' for the first layers, then 'moe'"
        if keys.get("num_hash_layers", hashed) != hashed:
            yield f"mlp_layer_types has {hashed} of 'hash_moe', and num_hash_layers is {keys['num_hash_layers']!r}"
    parameters = keys.get("rope_parameters")
    main = parameters.get("main") if isinstance(parameters, dict) else None
    if isinstance(main, dict) and main.get("rope_type", "default") != "default":
        yield f"rope_parameters.main is of type {main['rope_type']!r}; layers without a compressor use plain RoPE"
    share, width, part = (keys.get(name) for name in ("partial_rotary_factor", "head_dim", "qk_rope_head_dim"))
    if isinstance(share, float) and not 0 < share <= 1:
        yield f"partial_rotary_factor is {share}; it must be above 0, and 1 or less"
    elif type(part) is int and _rotary(keys) not in (None, part):
        yield f"partial_rotary_factor={share} of head_dim={width} is not qk_rope_head_dim={part}"


def _translate(keys: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """The config's fields among the keys, transformers' spellings turned into DeepSeek's."""
    for name in FIELDS.keys() & keys.keys() - {"rope_scaling"}:
        yield name, keys[name]
    if "compress_ratios" not in keys and "layer_types" in keys:
        types = keys["layer_types"] if isinstance(keys["layer_types"], list) else []
        unknown = [one for one in types if str(one) not in RATIO_OF_LAYER_TYPE]
        if unknown:
            problems.append(f"layer_types holds {unknown[0]!r}; known are {', '.join(RATIO_OF_LAYER_TYPE)}")
        elif isinstance(keys["layer_types"], list):
            yield "compress_ratios", [RATIO_OF_LAYER_TYPE[one] for one in types]
    if "num_hash_layers" not in keys and isinstance(keys.get("mlp_layer_types"), list):
        yield "num_hash_layers", keys["mlp_layer_types"].count("hash_moe")
    if "qk_rope_head_dim" not in keys and (rotary := _rotary(keys)) is not None:
        yield "qk_rope_head_dim", rotary
    if "topk_method" not in keys:
        yield "topk_method", CHOICES["topk_method"][0]
    scaling = keys.get("rope_scaling", _nested_scaling(keys))
    if scaling is not None:
        yield "rope_scaling", _scaling(scaling, problems)
    elif "rope_scaling" in keys:
        yield "rope_scaling", None


def _rotary(keys: Mapping[str, Any]) -> int | None:
    """Dims that RoPE rotates, in transformers' spelling; None where it is not used, or is not sound."""
    share, width = keys.get("partial_rotary_factor"), keys.get("head_dim")
    if not isinstance(share, float) or not 0 < share <= 1 or type(width) is not int or not 0 < width <= MOST:
        return None
    return int(width * share)


def _nested_scaling(keys: Mapping[str, Any]) -> Any:
    parameters = keys.get("rope_parameters")
    return parameters.get("compress", parameters) if isinstance(parameters, dict) else None


def _scaling(value: Any, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value.get("type", value.get("rope_type", "yarn"))
    if kind == "default":  # transformers' word for plain RoPE
        return None
    if kind != "yarn":
        problems.append(f"rope_scaling is of type {kind!r}; the family uses 'yarn'")
    known = {field.name for field in attrs.fields(RopeScaling)}
    return RopeScaling(**{name: value[name] for name in known & value.keys()})
