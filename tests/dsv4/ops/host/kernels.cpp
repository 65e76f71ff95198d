// Kernels of the ops for the host's memory, for tests of what calls them. Each fills its outs with a byte, the rows of
// its first tensor, unless the first four bytes of that tensor ask for something else.
#include "ops.h"

#include <cstring>
#include <stdexcept>

namespace dsv4 {
namespace {

constexpr uint32_t kRefused = 0x7fff7f01, kNotTaken = 0x7fff7f02, kFails = 0x7fff7f03;

int64_t bytes_of(const Operand& one) {
  int64_t bytes = one.dtype == DType::f32 || one.dtype == DType::i32 ? 4 : one.dtype == DType::bf16 ? 2 : 1;
  for (int i = 0; i < one.dims; ++i) bytes *= one.size[i];
  return bytes;
}

void fill(const Call& call, int written) {
  const int64_t rows = call.tensor[0].size[0];
  uint32_t asked = 0;
  if (rows > 0) std::memcpy(&asked, call.tensor[0].address, sizeof asked);
  if (asked == kRefused) throw Refused("a call", "do not");
  if (asked == kNotTaken || call.tensor[0].dtype == DType::other) throw NotTaken();
  if (asked == kFails) throw std::runtime_error("no kernel");
  for (int i = call.tensors - written; i < call.tensors; ++i) {
    std::memset(call.tensor[i].address, static_cast<int>(rows), bytes_of(call.tensor[i]));
  }
}

}  // namespace

#define FILLS(op, written) \
  void op(const Call& call) { fill(call, written); }
FILLS(q_norm_rope_kv_insert, 1)
FILLS(q_kv_rmsnorm, 2)
FILLS(rms_norm, 1)
FILLS(indexer_q_rope, 2)
FILLS(indexer_q_rope_fp8, 2)
FILLS(indexer_q_rope_fp4, 3)
FILLS(inverse_rope, 1)
FILLS(inverse_rope_fp8, 2)
FILLS(save_partial_states, 0)
FILLS(pool_states, 1)
FILLS(store_compressed, 0)
FILLS(compress, 0)
FILLS(indexer_logits, 1)
FILLS(indexer_top_k, 1)
FILLS(global_top_k, 2)
FILLS(gather_keys, 1)
FILLS(sparse_attention_decode, 2)
FILLS(sparse_attention_prefill, 1)
FILLS(mhc_pre, 3)
FILLS(mhc_post, 1)
FILLS(mhc_post_pre, 4)
FILLS(hc_head, 1)
FILLS(route, 2)
FILLS(swiglu, 1)
FILLS(routed_experts, 5)
FILLS(combine_experts, 1)
FILLS(combine_indices, 2)

}  // namespace dsv4
