// Every op: checks a call, then launches its kernels on the call's stream.
#pragma once
#include "call.h"

namespace dsv4 {

void q_norm_rope_kv_insert(const Call& call);
void q_kv_rmsnorm(const Call& call);
void rms_norm(const Call& call);
void indexer_q_rope(const Call& call);
void indexer_q_rope_fp8(const Call& call);
void indexer_q_rope_fp4(const Call& call);
void inverse_rope(const Call& call);
void inverse_rope_fp8(const Call& call);
void save_partial_states(const Call& call);
void pool_states(const Call& call);
void store_compressed(const Call& call);
void compress(const Call& call);
void indexer_logits(const Call& call);
void indexer_top_k(const Call& call);
void global_top_k(const Call& call);
void gather_keys(const Call& call);
void sparse_attention_decode(const Call& call);
void sparse_attention_prefill(const Call& call);
void mhc_pre(const Call& call);
void mhc_post(const Call& call);
void mhc_post_pre(const Call& call);
void hc_head(const Call& call);
void route(const Call& call);
void swiglu(const Call& call);
void routed_experts(const Call& call);
void combine_experts(const Call& call);
void combine_indices(const Call& call);

}  // namespace dsv4
