// Softmax-gated pooling of complete groups, to a scratch from which another kernel goes on.
//
// Floor: every state read once. A block takes 32 channels of a group, so that a group of 128 tokens is 16 neighbouring
// blocks, which go to different multiprocessors; rows without a slot are told apart by one vote over a chunk of them. A
// warp looks up, copies and pools 16 rows of its own, and waits for nobody until the sums are merged.
#include "compressor.cuh"
#include "ops.h"

namespace dsv4 {
namespace {

constexpr int kPoolWarps = 8, kWarpRows = 16, kTileRows = kPoolWarps * kWarpRows;
constexpr int kPoolChannels = 32;  // of a block: a row's channels are split among blocks
constexpr int kRowQuads = kPoolChannels / kQuad;
constexpr int kCopyRows = 32 / (2 * kRowQuads);  // of a warp's copy: kv and score
constexpr int kLooks = 2;                        // rows a lane looks at
constexpr int kFewTokens = 64, kFewRows = 8;     // looked at by a block, so that few tokens have many blocks

struct PoolArguments {
  States states;
  Rows rows;
  float* pooled;  // [tokens, width]
  int width, ratio, window;
};

__global__ void __launch_bounds__(32 * kPoolWarps, kResident) pool_kernel(const __grid_constant__ PoolArguments a) {
  __shared__ float4 tile[kPoolWarps][kWarpRows][2][kRowQuads];  // a warp reads what it copied itself
  __shared__ float merged[3][kPoolWarps][kPoolChannels];
  fetch_ahead(a.rows, blockIdx.y, threadIdx.x);
  await_predecessor();
  const int lane = threadIdx.x % 32u, warp = threadIdx.x / 32u;
  const int quad = lane % kRowQuads, part = lane / kRowQuads % 2;  // of a copy: kv or score
  const uint32_t column = blockIdx.x * kRowQuads + quad + part * (a.states.width / 2 / kQuad);
  for_each_slot<kLooks>(a.rows, blockIdx.y, [&](int token, int, int last, int request) {
    const int before = rows_before(last, a.window);
    Pooled p;
    for (int start = warp * kWarpRows; start < a.window; start += kTileRows) {
      // Rows of the warp that are there. Lanes look up one each.
      const int begin = before - start, end = a.window - start;
      const int own = max(begin, min(lane % kWarpRows, end - 1));
      const uint32_t at = last - (end - 1 - own);
      const uint32_t offset = row_offset(a.states, block_of(a.states, request, at), at);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kWarpRows / kCopyRows; ++i) {
        const int r = i * kCopyRows + lane / (2 * kRowQuads);
        // With overlap the group before has the first half of the columns, the group itself the second.
        const uint32_t half = a.window > a.ratio && start + r >= a.ratio ? a.width / kQuad : 0;
        float4* to = &tile[warp][r][part][quad];
        const uint32_t from = __shfl_sync(kWholeWarp, offset, r) + half + column;
        if (r >= begin && r < end) {
          copy_async(to, a.states.base + from);
        } else {
          *to = absent(part);
        }
      }
      let_successor();  // once this kernel's reads are under way: see launch.cuh
      wait_copies();
      __syncwarp();
      float kv[kWarpRows], score[kWarpRows];
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        kv[r] = reinterpret_cast<const float*>(tile[warp][r][0])[lane];
        score[r] = reinterpret_cast<const float*>(tile[warp][r][1])[lane];
      }
      p = start < kTileRows ? pool<kWarpRows>(kv, score) : merge(p, pool<kWarpRows>(kv, score));
    }
    __syncthreads();  // whoever still reads the row before
    merged[0][warp][lane] = p.most;
    merged[1][warp][lane] = p.weight;
    merged[2][warp][lane] = p.sum;
    __syncthreads();
    if (warp == 0) {
      Pooled own[kPoolWarps];
#pragma unroll
      for (int w = 0; w < kPoolWarps; ++w) own[w] = {merged[0][w][lane], merged[1][w][lane], merged[2][w][lane]};
#pragma unroll
      for (int step = kPoolWarps / 2; step > 0; step /= 2) {
#pragma unroll
        for (int w = 0; w < step; ++w) own[w] = merge(own[w], own[w + step]);
      }
      a.pooled[static_cast<int64_t>(token) * a.width + blockIdx.x * kPoolChannels + lane] = value_of(own[0]);
    }
  });
}

}  // namespace

void pool_states(const Call& call) {
  Reader r(call);
  int64_t tokens = kUnbound, width = kUnbound;
  PoolArguments a{};
  a.states = read_states(r, a.rows, tokens);
  a.rows.slots = r.in("slots", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  a.pooled = r.out("pooled", {DType::f32}, {&tokens, &width}).as<float>();
  a.ratio = static_cast<int>(r.integer());
  const bool overlap = r.integer() != 0;
  r.require(a.ratio > 0, "ratio", "is " + std::to_string(a.ratio), "pass the tokens of a group");
  r.require(width % kPoolChannels == 0, "pooled", "has " + std::to_string(width) + " columns", "pass a multiple of 32");
  r.require(a.states.width == width * (overlap ? 4 : 2), "state", "has another width than pooled",
            "pass kv and score of its columns");
  r.done();
  if (tokens == 0 || a.states.table == nullptr) return;
  a.rows.tokens = static_cast<int>(tokens);
  a.rows.chunk = tokens <= kFewTokens ? kFewRows : 32 * kLooks;
  a.width = static_cast<int>(width);
  a.window = a.ratio * (overlap ? 2 : 1);
  const dim3 grid(a.width / kPoolChannels, ceil_div(tokens, a.rows.chunk));
  launch(call, pool_kernel, grid, 32 * kPoolWarps, a);
}

}  // namespace dsv4
