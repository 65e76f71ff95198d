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
};

void run(const Op& op, Call& call) {
  call.op = op.name;
  const OnDevice guard(call.tensor[0].device);
  op.run(call);
}

}  // namespace dsv4
