"""The model's ops: one schema each in the namespace ``dsv4``, out form, with CPU references.

Each is a `dsv4.ops.op.Op`: called with ``out=`` tensors or slots, it checks its arguments, runs on the caller's current
stream and returns the outs; ``op.layout(T, ...)`` says what it writes. Kernels for other devices register themselves
for the same schemas.
"""

from dsv4.ops.attention import sparse_attention_decode, sparse_attention_prefill
from dsv4.ops.compressor import compress, pool_states, save_partial_states, store_compressed
from dsv4.ops.errors import OpError
from dsv4.ops.experts import route, routed_experts, swiglu
from dsv4.ops.gather import combine_indices, gather_keys
from dsv4.ops.hyper_connection import hc_head, mhc_post, mhc_post_pre, mhc_pre
from dsv4.ops.indexer import global_top_k, indexer_logits, indexer_top_k
from dsv4.ops.indexer_query import indexer_q_rope, indexer_q_rope_fp4, indexer_q_rope_fp8
from dsv4.ops.insert import q_norm_rope_kv_insert
from dsv4.ops.inverse_rope import inverse_rope, inverse_rope_fp8
from dsv4.ops.norms import q_kv_rmsnorm, rms_norm
from dsv4.ops.op import Op

__all__ = [
    "Op",
    "OpError",
    "combine_indices",
    "compress",
    "gather_keys",
    "global_top_k",
    "hc_head",
    "indexer_logits",
    "indexer_q_rope",
    "indexer_q_rope_fp4",
    "indexer_q_rope_fp8",
    "indexer_top_k",
    "inverse_rope",
    "inverse_rope_fp8",
    "mhc_post",
    "mhc_post_pre",
    "mhc_pre",
    "pool_states",
    "q_kv_rmsnorm",
    "q_norm_rope_kv_insert",
    "rms_norm",
    "route",
    "routed_experts",
    "save_partial_states",
    "sparse_attention_decode",
    "sparse_attention_prefill",
    "store_compressed",
    "swiglu",
]
