"""What is measured: calls of the ops at V4-Flash's widths, and what each must read, write and multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from benchmarks.kernels.calls import call, compressed, decode, logits, pooled, prefill, save_states, stored, top_k
from benchmarks.kernels.maker import Call, Maker
from dsv4.cache.pages import Format
from dsv4.ops.attention import decode_splits

ROWS = (1, 2, 8, 64, 256, 512, 1023, 2048, 8192)
HYPER_ROWS = tuple(sorted((*ROWS, 16, 4096)))
"""With the fewest of the kernel for many rows, and one more of those that have a target."""
KEYS = 640
STATE_BYTES = 584


def nothing(_: Call) -> int:
    return 0


@attrs.frozen
class Case:
    """One op at several numbers of rows.

    Attributes
    ----------
    make
        A call of so many rows with memory of its own, by seed.
    floor_bytes
        What any implementation reads and writes, caches and states included.
    floor_flop
        What it multiplies and adds on tensor cores.
    """

    make: Callable[[int, int], Call]
    floor_bytes: Callable[[Call], int]
    floor_flop: Callable[[Call], int] = nothing
    rows: tuple[int, ...] = ROWS


def _case(make: Callable[..., Call], floor_bytes: Callable[[Call], int], **how: Any) -> Case:
    return Case(lambda rows, seed: make(Maker("cuda", seed, "random"), rows, **how), floor_bytes)


def _named(name: str, floor_bytes: Callable[[Call], int]) -> Case:
    return Case(lambda rows, seed: call(name, rows, seed=seed), floor_bytes)


# -- bytes -------------------------------------------------------------------------------------------------


def moved(*skipped: int) -> Callable[[Call], int]:
    """Every out written, every input tensor read, but for the skipped ones (tables, caches)."""

    def count(made: Call) -> int:
        read = [one for place, one in enumerate(made.inputs) if hasattr(one, "nbytes") and place not in skipped]
        return sum(one.nbytes for one in (*read, *made.outs))

    return count


def insert_bytes(made: Call) -> int:
    """q, kv, slots and positions read, a row of the table a token; q_out and the inserted states written."""
    q, kv, _, slots, positions = made.inputs[:5]
    inserted = int((slots >= 0).sum())
    return q.nbytes + kv.nbytes + slots.nbytes + positions.nbytes * 33 + made.outs[0].nbytes + inserted * STATE_BYTES


def saved_bytes(made: Call) -> int:
    """kv_score read where there is a slot, a row of states written."""
    kv_score, _, positions, slots, _ = made.inputs
    return int((slots >= 0).sum()) * kv_score.shape[1] * 8 + positions.nbytes + slots.nbytes


def pooled_bytes(window: int, width: int, written: int) -> Callable[[Call], int]:
    """Of each complete group kv and score of its window read, a state written; slots and positions of every row."""

    def count(made: Call) -> int:
        slots = made.inputs[4]
        return int((slots >= 0).sum()) * (window * 2 * width * 4 + written) + 16 * len(slots)

    return count


def stored_bytes(made: Call) -> int:
    return int((made.inputs[4] >= 0).sum()) * (512 * 4 + STATE_BYTES + 256) + 16 * len(made.inputs[4])


def logits_bytes(made: Call) -> int:
    """Queries and each row's own keys read, logits written."""
    q, _, weights = made.inputs[:3]
    return q.nbytes + weights.nbytes + made.outs[0].nbytes + int(made.inputs[6].sum()) * 132


def logits_flop(made: Call) -> int:
    return int(made.inputs[6].sum()) * made.inputs[0].shape[1] * 128 * 2


def attention_bytes(made: Call) -> int:
    return made.inputs[0].nbytes * 2 + len(made.inputs[0]) * KEYS * STATE_BYTES


def prefill_bytes(made: Call) -> int:
    """Gathered keys once: they are shared by the rows."""
    return made.inputs[0].nbytes * 2 + made.inputs[1].nbytes


def attention_flop(made: Call) -> int:
    return made.inputs[0].numel() * KEYS * 4


# -- calls -------------------------------------------------------------------------------------------------


def _decode(rows: int, seed: int) -> Call:
    """Every row with its own 640 keys, window and top-k."""
    device = torch.cuda.get_device_properties(0)
    # From sm_90 on the kernel splits keys over the blocks of a cluster by itself, as the model has it.
    splits = decode_splits(rows, 64, KEYS, device.multi_processor_count) if device.major < 9 else 0
    return decode(Maker("cuda", seed, "random"), rows, splits=splits, full=True, states=max(4096, rows * 512))


def _logits(layout: Format) -> Callable[[int, int], Call]:
    return lambda rows, seed: logits(Maker("cuda", seed, "random"), rows, layout, keys=4096, requests=rows)


INDEX_ROWS, ATTENTION_ROWS = (1, 8, 64, 256), (1, 8, 64, 128, 512, 1024)

CASES: dict[str, Case] = {
    "q_norm_rope_kv_insert": _named("q_norm_rope_kv_insert", insert_bytes),
    "q_kv_rmsnorm": _named("q_kv_rmsnorm", moved()),
    "rms_norm": _named("rms_norm", moved()),
    "indexer_q_rope_fp8": _named("indexer_q_rope_fp8", moved(3)),
    "indexer_q_rope_fp4": _named("indexer_q_rope_fp4", moved(3)),
    "inverse_rope": _named("inverse_rope", moved(2)),
    "inverse_rope_fp8": _named("inverse_rope_fp8", moved(2)),
    "save_partial_states, C4": _case(save_states, saved_bytes),
    "save_partial_states, C128": _case(save_states, saved_bytes, width=1024, ratio=128, block=8),
    "compress, C4": _case(compressed, pooled_bytes(8, 512, STATE_BYTES)),
    "compress, indexer FP8": _case(compressed, pooled_bytes(8, 128, 132), layout=Format.INDEXER_FP8),
    "compress, indexer FP4": _case(compressed, pooled_bytes(8, 128, 68), layout=Format.INDEXER_FP4),
    "pool_states, C128": _case(pooled, pooled_bytes(128, 512, 2048)),
    "store_compressed, C128": _case(stored, stored_bytes),
    "indexer_logits, FP8": Case(_logits(Format.INDEXER_FP8), logits_bytes, logits_flop, INDEX_ROWS),
    "indexer_logits, FP4": Case(_logits(Format.INDEXER_FP4), logits_bytes, logits_flop, INDEX_ROWS),
    "indexer_top_k, 4096": _case(top_k, moved(), width=4096),
    "indexer_top_k, 65536": attrs.evolve(_case(top_k, moved(), width=65536), rows=INDEX_ROWS),
    "global_top_k": _named("global_top_k", moved(2)),
    "gather_keys": Case(lambda rows, seed: call("gather_keys", rows, seed=seed), lambda made: len(made.outs[0]) * 1608),
    "sparse_attention_decode": Case(_decode, attention_bytes, attention_flop, ATTENTION_ROWS),
    "sparse_attention_prefill": Case(
        lambda rows, seed: prefill(Maker("cuda", seed, "random"), rows, full=True), prefill_bytes, attention_flop,
        (64, 512, 2048),
    ),
    "mhc_pre": attrs.evolve(_named("mhc_pre", moved(1, 2, 3, 4)), rows=HYPER_ROWS),
    "mhc_post": _named("mhc_post", moved()),
    "mhc_post_pre": attrs.evolve(_named("mhc_post_pre", moved(4, 5, 6, 7)), rows=HYPER_ROWS),
    "hc_head": _named("hc_head", moved(1, 2, 3, 4)),
}  # fmt: skip
