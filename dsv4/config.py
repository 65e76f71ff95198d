"""The configuration of a DeepSeek-V4 model, validated as a whole."""

import enum
import math
import typing
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import attrs

from dsv4.errors import listed


class LayerKind(enum.StrEnum):
    """What a layer attends to besides its sliding window."""

    SWA = "swa"
    """The sliding window only (ratio 0)."""
    C4 = "c4"
    """The top-k of keys compressed 4 to 1, chosen by the indexer."""
    C128 = "c128"
    """All keys compressed 128 to 1."""


KIND_OF_RATIO = {0: LayerKind.SWA, 4: LayerKind.C4, 128: LayerKind.C128}

RATIO = {kind: ratio for ratio, kind in KIND_OF_RATIO.items()}
"""Positions that a layer's compressor makes one of; 0: it has none."""


@attrs.frozen(kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers with a compressor (vLLM #54815: never of SWA-only layers)."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def _as_tuple(value: Any) -> Any:
    """A list becomes a tuple, so that a config can be hashed; anything else is left for `check` to name."""
    return tuple(value) if isinstance(value, list) else value


@attrs.frozen(kw_only=True, cache_hash=True)
class ModelConfig:
    """Shapes and constants of one model; field names are those of the family's ``config.json``.

    Raises
    ------
    ModelConfigError
        Lists every value that breaks a rule, not the first one only.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 1
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...] = attrs.field(converter=_as_tuple)
    """One ratio a layer, and behind them those of the MTP layers or padding."""
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    vocab_size: int
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float
    num_hash_layers: int = 3
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = RopeScaling()
    max_position_embeddings: int = 1048576
    bos_token_id: int = 0
    eos_token_id: int = 1
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 1
    expert_dtype: str = "fp4"

    def __attrs_post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in attrs.fields(ModelConfig)}
        problems = list(check(values))
        if problems:
            raise listed("the model config", problems)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each of the ``num_hidden_layers`` layers; MTP layers are SWA-only and not among them."""
        return tuple(KIND_OF_RATIO[ratio] for ratio in self.compress_ratios[: self.num_hidden_layers])


def reduced(config: ModelConfig, layers: int | None = None, experts: int | None = None) -> ModelConfig:
    """The first layers and the first routed experts of a model; what is None stays whole.

    Attention keeps its shapes, so that kernels see those of the published models on one GPU. MTP blocks stay.

    Raises
    ------
    ModelConfigError
        There are not as many, or fewer experts than a token is sent to.
    """
    layers = config.num_hidden_layers if layers is None else layers
    experts = config.n_routed_experts if experts is None else experts
    most, least, every = config.num_hidden_layers, config.num_experts_per_tok, config.n_routed_experts
    problems = []
    if type(layers) is not int or not 1 <= layers <= most:
        problems.append(f"layers={layers!r} of a model that has {most}; it must be 1 to {most}")
    if type(experts) is not int or not least <= experts <= every:
        problems.append(
            f"experts={experts!r} of a model that has {every}, and sends each token to {least}; "
            f"it must be {least} to {every}"
        )
    if problems:
        raise listed(
            "the reduced model",
            problems,
            f"choose --layers from 1 to {most} and --experts from {least} to {every}, or leave them out for all",
        )
    ratios = config.compress_ratios
    return attrs.evolve(
        config,
        num_hidden_layers=layers,
        compress_ratios=ratios[:layers] + ratios[config.num_hidden_layers :],
        num_hash_layers=min(layers, config.num_hash_layers),
        n_routed_experts=experts,
    )


MAY_BE_ZERO = frozenset(
    ("n_shared_experts", "num_hash_layers", "bos_token_id", "eos_token_id", "num_nextn_predict_layers")
)


MOST = 2**20
"""Of a size that is not among `BOUNDS`: every dimension and count of the family is far below."""

BOUNDS = {
    "num_hidden_layers": 512,
    "num_nextn_predict_layers": 16,
    "n_routed_experts": 2048,
    "n_shared_experts": 64,
    "hc_mult": 64,
    "hc_sinkhorn_iters": 1000,
    "vocab_size": 2**24,
    "bos_token_id": 2**24,
    "eos_token_id": 2**24,
    "max_position_embeddings": 2**30,
}
"""Most of what is counted out (a name each tensor, a step each iteration) or indexed: a damaged file asks for more."""


def wrong_type(value: object, kind: object) -> str | None:
    """What is wrong with a value's type, None when nothing is."""
    if kind is float:
        sound = isinstance(value, int | float) and type(value) is not bool and _finite(value)
        return None if sound else f"must be a finite number, not {value!r}"
    if kind in (int, bool, str):
        return None if type(value) is kind else f"must be {kind.__name__}, not {value!r}"
    return None


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def check(values: Mapping[str, Any]) -> Iterator[str]:
    """Everything wrong with a possibly incomplete set of values: types and ranges, then relations."""
    sound = dict(values)
    for name, value in values.items():
        kind = FIELDS[name]
        if name == "compress_ratios":
            problem = _ratio_type(value)
        elif name == "rope_scaling":
            problem = _scaling_type(value)
        else:
            problem = wrong_type(value, kind)
            if problem is None and kind in (int, float):
                most = BOUNDS.get(name, MOST) if kind is int else math.inf
                problem = _range(value, name in MAY_BE_ZERO, most)
        if problem:
            # A relation between values is only worth reporting when the values themselves are sound.
            del sound[name]
            yield f"{name} {problem}"
    yield from _relations(sound)


def _range(value: float, may_be_zero: bool, most: float) -> str | None:
    if value > most:
        return f"is {value}; it must be {most} or less"
    if value > 0 or (value == 0 and may_be_zero):
        return None
    return f"is {value}; it must be {'0 or more' if may_be_zero else 'above 0'}"


def _ratio_type(value: object) -> str | None:
    if not isinstance(value, list | tuple) or any(type(ratio) is not int for ratio in value):
        return f"must be a list of integers, not {value!r}"
    return None


def _scaling_type(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, RopeScaling):
        return f"must be YaRN parameters or null, not {value!r}"
    for field in attrs.fields(RopeScaling):
        found = getattr(value, field.name)
        problem = wrong_type(found, field.type) or (None if found > 0 else f"is {found}; it must be above 0")
        if problem:
            return f".{field.name} {problem}"
    return None


def _relations(v: Mapping[str, Any]) -> Iterator[str]:
    def have(*names: str) -> bool:
        return all(name in v for name in names)

    if have("compress_ratios"):
        for layer, ratio in enumerate(v["compress_ratios"]):
            if ratio not in KIND_OF_RATIO:
                yield f"compress_ratios[{layer}] is {ratio}; it must be 0 (which vLLM turns to 1), 4 or 128"
        if have("num_hidden_layers") and len(v["compress_ratios"]) < v["num_hidden_layers"]:
            yield (
                f"compress_ratios has {len(v['compress_ratios'])} entries for num_hidden_layers="
                f"{v['num_hidden_layers']}; each layer needs one (more are taken as MTP layers or padding)"
            )
    if have("num_key_value_heads") and v["num_key_value_heads"] != 1:
        yield f"num_key_value_heads is {v['num_key_value_heads']}; the family has one latent K=V head"
    if have("num_attention_heads", "o_groups") and v["num_attention_heads"] % v["o_groups"]:
        yield f"num_attention_heads={v['num_attention_heads']} is not divisible by o_groups={v['o_groups']}"
    if have("qk_rope_head_dim") and v["qk_rope_head_dim"] % 2:
        yield f"qk_rope_head_dim={v['qk_rope_head_dim']} is odd; RoPE rotates pairs"
    for width in ("head_dim", "index_head_dim"):
        if have(width, "qk_rope_head_dim") and v[width] < v["qk_rope_head_dim"]:
            yield f"{width}={v[width]} is below qk_rope_head_dim={v['qk_rope_head_dim']}, which is its tail"
    for part, whole in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("num_hash_layers", "num_hidden_layers"),
    ):
        if have(part, whole) and v[part] > v[whole]:
            yield f"{part}={v[part]} is above {whole}={v[whole]}"
    for token in ("bos_token_id", "eos_token_id"):
        if have(token, "vocab_size") and v[token] >= v["vocab_size"]:
            yield f"{token}={v[token]} is outside the vocabulary of {v['vocab_size']}"
    for name, known in CHOICES.items():
        if have(name) and v[name] not in known:
            yield f"{name} is {v[name]!r}; it must be one of {', '.join(known)}"


CHOICES = {
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "expert_dtype": ("fp4", "fp8"),
}

FIELDS: dict[str, object] = typing.get_type_hints(ModelConfig)
REQUIRED = tuple(field.name for field in attrs.fields(ModelConfig) if field.default is attrs.NOTHING)
