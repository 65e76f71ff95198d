#include "table.h"

#include "ops.h"

namespace dsv4 {

const Op kOps[kOpCount] = {
    {"q_norm_rope_kv_insert", "ttttttfiit", q_norm_rope_kv_insert},
    {"q_kv_rmsnorm", "tttftt", q_kv_rmsnorm},
    {"rms_norm", "ttft", rms_norm},
    {"indexer_q_rope", "ttttftt", indexer_q_rope},
    {"indexer_q_rope_fp8", "ttttftt", indexer_q_rope_fp8},
    {"indexer_q_rope_fp4", "ttttfttt", indexer_q_rope_fp4},
    {"inverse_rope", "tttit", inverse_rope},
    {"inverse_rope_fp8", "tttitt", inverse_rope_fp8},
    {"save_partial_states", "ttttt", save_partial_states},
    {"pool_states", "tttttibt", pool_states},
    {"store_compressed", "ttttttifii", store_compressed},
    {"compress", "ttttttttibfii", compress},
    {"indexer_logits", "totttttiit", indexer_logits},
    {"indexer_top_k", "ttt", indexer_top_k},
    {"global_top_k", "ttttitt", global_top_k},
    {"gather_keys", "tttttiiit", gather_keys},
    {"sparse_attention_decode", "ttttoootfiiiitt", sparse_attention_decode},
    {"sparse_attention_prefill", "tttttft", sparse_attention_prefill},
    {"mhc_pre", "tttttffittt", mhc_pre},
    {"mhc_post", "ttttt", mhc_post},
    {"mhc_post_pre", "ttttttttffitttt", mhc_post_pre},
    {"hc_head", "tttttfft", hc_head},
    {"route", "tootftt", route},
    {"swiglu", "tft", swiglu},
    {"routed_experts", "tttttfttttt", routed_experts},
    {"combine_experts", "ttttt", combine_experts},
    {"combine_indices", "tttttoiitt", combine_indices},
};

void run(const Op& op, Call& call) {
  call.op = op.name;
  const OnDevice guard(call.tensor[0].device);
  op.run(call);
}

}  // namespace dsv4
