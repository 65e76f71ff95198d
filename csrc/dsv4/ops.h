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

}  // namespace dsv4
