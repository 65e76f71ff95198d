"""Which tensor of the model a stored name means: one spelling for all that are in use.

Three are: DeepSeek's own; the state dict of transformers; and what transformers' ``save_pretrained`` writes by default,
DeepSeek's names below ``model.`` with a few of its own among them (5.24, ``conversion_mapping.py``).
"""

from __future__ import annotations

import re

from dsv4.model.transformers_names import DOWN, GATE_UP, INSIDE, OUTSIDE

_OUTSIDE = {theirs.removeprefix("model."): ours for ours, theirs in OUTSIDE.items()}
_INSIDE = {theirs: ours for ours, theirs in INSIDE.items()}

STACKED = {"ffn.experts.gate_up": ("w1", "w3"), "ffn.experts.down": ("w2",)}
"""All experts of a layer in one tensor, and whose rows it holds, one below the other."""

_SPELLED = INSIDE | {"ffn.experts.gate_up": GATE_UP, "ffn.experts.down": DOWN}
_INSIDE |= {GATE_UP: "ffn.experts.gate_up", DOWN: "ffn.experts.down"}
# The reverse of transformers' renaming of the compressors' norms catches this one, too.
_INSIDE["attn.norm.weight"] = "attn.kv_norm.weight"

_BLOCK = re.compile(r"((?:layers|mtp)\.\d+\.)(.+)")
_SCALE = re.compile(r"(.+\.)(?:scale|weight_scale_inv)")


def canonical(stored: str) -> str:
    """DeepSeek's name of a stored tensor; of one that is none of the model's, the name itself."""
    name = stored.removeprefix("model.")
    found = _known(name)
    scale = _SCALE.fullmatch(name)
    if found == name and scale:
        # A scale has its weight's name but for the end.
        return _known(f"{scale[1]}weight").removesuffix("weight") + "scale"
    return found


def _known(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    if block:
        return block[1] + _INSIDE.get(block[2], block[2])
    return _OUTSIDE.get(name, name)


def in_transformers(name: str) -> str:
    """What the state dict of transformers calls a tensor, for messages; MTP blocks have DeepSeek's names there, too."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return OUTSIDE.get(name, name)
    return f"model.{block[1]}{_SPELLED.get(block[2], block[2])}" if name.startswith("layers.") else name


def scale_of(name: str) -> str:
    """Name of the scales of a quantised matrix."""
    return name.removesuffix("weight") + "scale"
