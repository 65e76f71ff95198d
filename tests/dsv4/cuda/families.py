"""How each op's results are held against its reference: bit by bit in float32, or within a tolerance in float64."""

from __future__ import annotations

import attrs


@attrs.frozen
class Family:
    """How near its reference an op must be.

    Attributes
    ----------
    tolerance
        Against float64: relative, and relative to the largest value of the row; None: every bit, against float32.
    exact
        Places among what is written that match bit by bit although there is a tolerance.
    packed
        What is written is a cache whose values carry rounding: few bytes may differ, and none by more than a step.
    data
        What the activations are filled with, by `benchmarks.kernels.maker.DATA`.
    """

    tolerance: tuple[float, float] | None = None
    exact: tuple[int, ...] = ()
    packed: bool = False
    data: tuple[str, ...] = ("random", "equal", "huge", "tiny", "zero", "mixed")


FAMILIES: dict[str, Family] = {
    "q_norm_rope_kv_insert": Family((8e-3, 1e-6), exact=(1,)),
    "q_kv_rmsnorm": Family((8e-3, 1e-6)),
    "rms_norm": Family((8e-3, 1e-6)),
    "indexer_q_rope": Family(),
    "indexer_q_rope_fp8": Family(),
    "indexer_q_rope_fp4": Family(),
    "inverse_rope": Family(),
    "inverse_rope_fp8": Family(),
    "save_partial_states": Family(),
    "pool_states": Family((1e-4, 1e-5), data=("random",)),
    "store_compressed": Family(packed=True),
    "compress": Family(packed=True, data=("random",)),
    "indexer_logits": Family((1e-4, 1e-5), data=("random", "zero", "equal")),
    "indexer_top_k": Family(),
    "global_top_k": Family(data=("random",)),
    "gather_keys": Family(data=("random",)),
    "sparse_attention_decode": Family((1e-2, 5e-3), data=("random", "equal", "tiny", "zero", "mixed")),
    "sparse_attention_prefill": Family((1e-2, 5e-3), data=("random", "equal", "tiny", "zero", "mixed")),
    "mhc_pre": Family((1e-2, 5e-3)),
    "mhc_post": Family((8e-3, 1e-6)),
    "mhc_post_pre": Family((1e-2, 5e-3)),
    "hc_head": Family((1e-2, 5e-3)),
    "route": Family((1e-5, 1e-6), exact=(0,), data=("random",)),
    "swiglu": Family((8e-3, 1e-6), data=("random", "equal", "huge", "zero", "mixed")),
}
