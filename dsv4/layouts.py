"""The scratch of one decoder layer, as layouts by stage: one lease per stage, the attention output its own.

Rows refer to the table of temporaries of vLLM's DeepSeek-V4 attention (``attention.py``, ``compressor.py``,
``nvidia/flashmla.py``, 0.26-0.29). Rows 2, 9, 12 and 31 are internal to the FP8 linear backend and are
estimates. The split accumulators of FlashMLA (part of row 27) are not modelled: the kernel sizes them itself.
A layout's name is the owner of its bytes in every report, so the three kinds of layer share the names.

Dims
----
T
    Tokens of the step, padded to the bucket in a graph.
Td, Tp
    Decode rows and prefill rows among them.
L
    Longest context the engine serves, in tokens; it sets the width of decode logits and of C128 index rows.
index_rows, index_keys
    Rows and gathered keys of the largest chunk of indexer logits in prefill.
gather_keys
    Keys that the largest group of prefill requests gathers for attention (requests x width).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from dsv4.config import LayerKind
from dsv4.shard import Shard
from workspace import Layout, spec

BF16, F32, FP8, U8, I32 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int32
I64 = torch.int64

ROWS_TO_4 = "(T+3)//4*4"

TOPK_WORKSPACE = "1048576*((Td+1048575)//1048576)"
"""1 MiB as soon as there is one decode row (row 21)."""


@lru_cache(maxsize=256)
def stage_layouts(shard: Shard, kind: LayerKind) -> dict[str, Layout]:
    """Layouts of one layer by the name under which `dsv4.topology` holds their leases.

    What the kinds have in common is one object, so that a lease may be held from one layer to the next.
    """
    return {
        "mhc_attn": hyper_connection(shard, "attention"),
        "inputs": input_projections(shard, kind),
        "norms": norms(shard),
        "output": attention_output(shard),
        "preparation": preparation(shard, kind),
        "attention": attention(shard, kind),
        "projection": output_projection(shard),
        "mhc_ffn": hyper_connection(shard, "ffn"),
        "ffn": ffn_output(shard),
    }


def _quantised(shard: Shard, width: int) -> tuple[int, torch.dtype]:
    """Scale columns and dtype of FP8 activations in blocks of 128 columns."""
    blocks = -(-width // 128)
    return (-(-blocks // 4), I32) if shard.architecture == "sm100" else (blocks, F32)


@lru_cache(maxsize=256)
def hyper_connection(shard: Shard, block: str) -> Layout:
    """The mHC streams around a block: residual, post and comb live to the block's end, layer_in feeds it."""
    streams, hidden = shard.config.hc_mult, shard.config.hidden_size
    return Layout(
        f"hyper_connection_{block}",
        residual=spec("T", streams, hidden, dtype=BF16),
        post=spec("T", streams, dtype=F32),
        comb=spec("T", streams, streams, dtype=F32),
        layer_in=spec("T", hidden, dtype=BF16),
    )


def input_projections(shard: Shard, kind: LayerKind) -> Layout:
    """Stage A, rows 2-6: the projections of the block's input. Live to the end of stage C."""
    config = shard.config
    columns, scale = _quantised(shard, config.hidden_size)
    specs: dict[str, Any] = {
        "x_fp8": spec("T", config.hidden_size, dtype=FP8),
        "x_scale": spec("T", columns, dtype=scale),
        "qr_kv": spec("T", config.q_lora_rank + config.head_dim, dtype=BF16),
    }
    if kind is not LayerKind.SWA:
        # C4 compresses two overlapping windows, hence twice the columns (coff = 2).
        width = 2 * config.head_dim * (2 if kind is LayerKind.C4 else 1)
        specs["kv_score"] = spec("T", width, dtype=F32)
    if kind is LayerKind.C4:
        specs["idx_w"] = spec("T", config.index_n_heads, dtype=BF16)
        specs["idx_kv_score"] = spec("T", 4 * config.index_head_dim, dtype=F32)
    return Layout("input_projections", **specs)


@lru_cache(maxsize=256)
def norms(shard: Shard) -> Layout:
    """Stage B, rows 7-8: normed query latent and KV. qr is read on two streams until the end of stage C."""
    config = shard.config
    return Layout("norms", qr=spec("T", config.q_lora_rank, dtype=BF16), kv=spec("T", config.head_dim, dtype=BF16))


def preparation(shard: Shard, kind: LayerKind) -> Layout:
    """Stage C, rows 9-16: queries, the indexer's quantised queries, the C128 compressor's partial state.

    q_out, iq and iq_weights are read in stage D; the rest dies in stage C.
    """
    config = shard.config
    columns, scale = _quantised(shard, config.q_lora_rank)
    heads, width = config.index_n_heads, config.index_head_dim
    specs: dict[str, Any] = {
        "qr_fp8": spec("T", config.q_lora_rank, dtype=FP8),
        "qr_scale": spec("T", columns, dtype=scale),
        "q": spec("T", shard.heads, config.head_dim, dtype=BF16),
        "q_out": spec("T", shard.padded_heads, config.head_dim, dtype=BF16),
    }
    if kind is LayerKind.C4:
        specs["idx_qr_fp8"] = spec("T", config.q_lora_rank, dtype=FP8)
        specs["idx_qr_scale"] = spec("T", columns, dtype=scale)
        specs["idx_q"] = spec("T", heads, width, dtype=BF16)
        if shard.indexer == "fp4":
            specs["iq"] = spec("T", heads, width // 2, dtype=U8)
            specs["iq_scale"] = spec("T", heads, width // 32, dtype=U8)
        else:
            specs["iq"] = spec("T", heads, width, dtype=FP8)
        specs["iq_weights"] = spec("T", heads, dtype=F32)
    if kind is LayerKind.C128:
        specs["compressed_kv"] = spec("T", config.head_dim, dtype=F32)
    return Layout("preparation", **specs)


@lru_cache(maxsize=256)
def attention_output(shard: Shard) -> Layout:
    """Row 1: o_padded, written in place by the attention kernel and read by the output projection."""
    return Layout("attention_output", o=spec("T", shard.padded_heads, shard.config.head_dim, dtype=BF16))


def attention(shard: Shard, kind: LayerKind) -> Layout:
    """Stage D, rows 18-27: the sparse indexer's and the attention kernels' scratch.

    Rows 18, 21 and 24-26 come from vLLM's WorkspaceManager, one buffer per process sized for the worst case.
    Here they are part of this lease, at the step's own size.
    """
    config = shard.config
    widths: dict[LayerKind, int | str] = {
        LayerKind.SWA: config.sliding_window,
        LayerKind.C4: config.index_topk + config.sliding_window,
        LayerKind.C128: f"(L+127)//128+{config.sliding_window}",
    }
    specs: dict[str, Any] = {
        "kv_gather": spec("gather_keys", config.head_dim, dtype=BF16),
        "combined_idx": spec("Tp", widths[kind], dtype=I32),
        "combined_lens": spec("Tp", dtype=I32),
        "lse": spec("T", shard.padded_heads, dtype=F32),
    }
    if kind is LayerKind.C4:
        packed = (config.index_head_dim // 2, U8) if shard.indexer == "fp4" else (config.index_head_dim, FP8)
        specs |= {
            "k_quant": spec("index_keys", packed[0], dtype=packed[1]),
            "k_scale": spec("index_keys", 4, dtype=U8),
            "logits_prefill": spec("index_rows", "index_keys", dtype=F32),
            "logits_decode": spec("Td", "L//4", dtype=F32),
            "topk_workspace": spec(TOPK_WORKSPACE, dtype=U8),
            "global_indices": spec("Td", config.index_topk, dtype=I32),
            "global_lens": spec("Td", dtype=I32),
        }
    return Layout("attention", **specs)


@lru_cache(maxsize=256)
def output_projection(shard: Shard) -> Layout:
    """Stage E, rows 28-32: quantised attention output, the grouped projection, the block's output."""
    config = shard.config
    columns, scale = _quantised(shard, shard.group_width)
    wide = shard.groups * config.o_lora_rank
    z_columns, z_scale = _quantised(shard, wide)
    return Layout(
        "output_projection",
        o_fp8=spec(shard.groups, "T", shard.group_width, dtype=FP8),
        o_scale=spec(shard.groups, ROWS_TO_4, columns, dtype=scale),
        z=spec("T", shard.groups, config.o_lora_rank, dtype=BF16),
        z_fp8=spec("T", wide, dtype=FP8),
        z_scale=spec("T", z_columns, dtype=z_scale),
        attn_out=spec("T", config.hidden_size, dtype=BF16),
    )


@lru_cache(maxsize=256)
def ffn_output(shard: Shard) -> Layout:
    """What the MoE returns. Its own scratch is not modelled: no source gives its sizes."""
    return Layout("ffn_output", y=spec("T", shard.config.hidden_size, dtype=BF16))


def persistent_tensors(shard: Shard, tokens: int, context: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what lives as long as the workspace, for steps of up to `tokens` tokens.

    Row 17 (the top-k indices, shared by all C4 layers), and what vLLM's metadata builder fills once per step:
    sliding-window and C128 indices of decode and prefill rows, their lengths, slots, token to request.
    """
    window = shard.config.sliding_window
    c128 = ((context + 127) // 128 + 127) // 128 * 128
    return {
        "topk_indices": ((tokens, shard.config.index_topk), I32),
        "decode_swa_indices": ((tokens, 1, window), I32),
        "prefill_swa_indices": ((tokens, 1, window), I32),
        "decode_swa_lens": ((tokens,), I32),
        "prefill_swa_lens": ((tokens,), I32),
        "decode_c128_indices": ((tokens, c128), I32),
        "prefill_c128_indices": ((tokens, c128), I32),
        "compressed_slots": ((tokens,), I64),
        "token_to_request": ((tokens,), I32),
    }
