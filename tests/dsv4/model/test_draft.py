"""The MTP block, against one put together from transformers' modules and the published formula."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from dsv4.cache.caches import Caches
from dsv4.model.decoder import Decoder, Draft
from dsv4.model.presets import MIXED, of_ratio
from dsv4.model.random_weights import random_tensors
from dsv4.model.transformers_names import INSIDE
from dsv4.model.weights import Assembly
from dsv4.scheduler import Rows
from tests.dsv4.model.made import blocks_for, context, decoder, prompt, step

LENGTH = 200


def draft_of(model: Decoder, tensors: dict[str, torch.Tensor]) -> Draft:
    assembly = Assembly(model.shard, model.precision, tensors)
    config = model.shard.config
    caches = Caches(config, model.precision.storage, blocks_for(config, 512, draft=True), draft=True)
    return Draft(model, assembly.draft(), caches)


def drafted(draft: Draft, rows: list[Rows], contexts: Any, residual: torch.Tensor) -> Any:
    ws = draft.target.ws
    with ws.on(draft.target.main), ws.slot(lane="draft"):
        return draft.forward(rows, contexts, residual)


def reference(tensors: dict[str, torch.Tensor], residual: torch.Tensor, following: list[int]) -> torch.Tensor:
    """Hidden states [T, H] of one MTP pass: transformers' layer, head and norms, DeepSeek's way in."""
    transformers = pytest.importorskip("transformers", minversion="5.17", reason="the layer is transformers'")
    from tests.dsv4.model.test_against_transformers import reference as model_of

    # The block is SWA-only and routes by bias: the second layer of a model of such layers.
    config = attrs.evolve(of_ratio(0), num_hash_layers=0)
    host = random_tensors(config, 0)
    for name, one in tensors.items():
        if name.startswith("mtp.0.") and (name[6:] in INSIDE or ".experts." in name):
            host[f"layers.1.{name[6:]}"] = one
    for part in ("fn", "base", "scale"):
        host[f"hc_head_{part}"] = tensors[f"mtp.0.hc_head_{part}"]
    host["norm.weight"] = tensors["mtp.0.norm.weight"]
    model = model_of(config, host).model
    norm = transformers.models.deepseek_v4.modeling_deepseek_v4.DeepseekV4RMSNorm

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        made = norm(x.shape[-1])
        made.weight.data = tensors[f"mtp.0.{name}.weight"]
        return made(x)

    with torch.no_grad():
        embedded = tensors["embed.weight"][torch.tensor(following)]
        embedded[0] = 0
        e = normed(embedded, "enorm") @ tensors["mtp.0.e_proj.weight"].T
        h = normed(residual, "hnorm") @ tensors["mtp.0.h_proj.weight"].T
        streams = (h + e[:, None])[None]
        at = torch.arange(len(following))[None]
        turns = {"main": model.rotary_emb(streams, position_ids=at, layer_type="main")}
        seen = (at[0][:, None] - at[0]).clamp(min=-1)
        mask = torch.where((seen >= 0) & (seen < config.sliding_window), 0.0, float("-inf"))[None, None]
        out = model.layers[1](
            streams, position_embeddings=turns, position_ids=at, attention_mask=mask, input_ids=None, cache=None
        )
        return model.norm(model.hc_head(out))[0]


def test_the_mtp_block_computes_the_published_formula() -> None:
    """From the target's streams and the tokens that follow, over more than one window."""
    tensors = random_tensors(MIXED, 5)
    model = decoder(MIXED, tensors=tensors)
    one = context(model, prompt(MIXED, LENGTH + 1))
    outcome = step(model, {0: one}, (0, 0, LENGTH, True))[0]
    found = drafted(draft_of(model, tensors), [Rows(0, 0, LENGTH, True, True)], {0: one}, outcome.residual)
    wanted = reference(tensors, outcome.residual, one.tokens[1:])
    assert (found.hidden - wanted).abs().max() <= 1e-4


def test_drafting_in_chunks_and_by_token_changes_nothing() -> None:
    """The block's own cache: chunks and decode rows give what one pass gives."""
    tensors = random_tensors(MIXED, 5)
    model = decoder(MIXED, tensors=tensors)
    one = context(model, prompt(MIXED, LENGTH + 1))
    residual = step(model, {0: one}, (0, 0, LENGTH, True))[0].residual
    whole = drafted(draft_of(model, tensors), [Rows(0, 0, LENGTH, True, True)], {0: one}, residual).hidden
    draft = draft_of(model, tensors)
    one.free()
    parts = []
    for start, count in ((0, 70), (70, 126), (196, 1), (197, 1), (198, 1), (199, 1)):
        rows = [Rows(0, start, count, count > 1, True)]
        parts.append(drafted(draft, rows, {0: one}, residual[start : start + count]).hidden)
    assert (torch.cat(parts) - whole).abs().max() <= 1e-4


def test_a_draft_with_another_token_differs() -> None:
    """Control: the next token enters the draft."""
    tensors = random_tensors(MIXED, 5)
    model = decoder(MIXED, tensors=tensors)
    found = []
    residual = None
    for last in (1, 2):
        one = context(model, [*prompt(MIXED, 20), last])
        residual = residual if residual is not None else step(model, {0: one}, (0, 0, 20, True))[0].residual
        draft = draft_of(model, tensors)
        found.append(drafted(draft, [Rows(0, 0, 20, True, True)], {0: one}, residual).hidden)
    assert (found[0][:19] - found[1][:19]).abs().max() <= 1e-4
    assert (found[0][19] - found[1][19]).abs().max() > 0.01
