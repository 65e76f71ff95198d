// Softmax-gated pooling of complete groups, to a scratch from which another kernel goes on.
//
// Floor: every state read once. A block takes 32 channels of a group, so that a group of 128 tokens is 16 blocks; rows
// without a slot are told apart by one vote over a chunk of them.
#include "compressor.cuh"
#include "ops.h"

namespace dsv4 {
namespace {

constexpr int kPoolThreads = 256, kPoolLanes = 8, kPoolRows = kPoolThreads / kPoolLanes;
constexpr int kPoolChannels = kPoolLanes * kChannels;  // of a block: a row's channels are split among blocks
constexpr int kPoolUnroll = 4;

struct PoolArguments {
  States states;
  Rows rows;
  float* pooled;  // [tokens, width]
  int width, ratio, window;
};

__global__ void __launch_bounds__(kPoolThreads) pool_kernel(const __grid_constant__ PoolArguments a) {
  after_predecessor();
  __shared__ float merged[3][kPoolRows][kPoolChannels];
  const int lane = threadIdx.x % kPoolLanes, group = threadIdx.x / kPoolLanes;
  const int channel = blockIdx.y * kPoolChannels + lane * kChannels;
  for_each_slot(a.rows, blockIdx.x, [&](int token, int64_t, int64_t last, int request) {
    const int64_t first = last - (a.window - 1);
    Pooled p = nothing_pooled();
    for (int start = group; start < a.window; start += kPoolRows * kPoolUnroll) {
      float4 kv[kPoolUnroll], score[kPoolUnroll];
#pragma unroll
      for (int i = 0; i < kPoolUnroll; ++i) {
        const int r = start + i * kPoolRows;
        // With overlap the group before has the first half of the columns, the group itself the second.
        const int column = channel + (a.window > a.ratio && r >= a.ratio ? a.width : 0);
        load_row(a.states, request, r < a.window ? first + r : -1, column, kv[i], score[i]);
      }
      pool<kPoolUnroll>(p, kv, score);
    }
    __syncthreads();  // whoever still reads the row before
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      merged[0][group][lane * kChannels + i] = p.most[i];
      merged[1][group][lane * kChannels + i] = p.weight[i];
      merged[2][group][lane * kChannels + i] = p.sum[i];
    }
    __syncthreads();
    if (threadIdx.x < kPoolChannels) {
      float most = -INFINITY, weight = 0, sum = 0;
#pragma unroll
      for (int g = 0; g < kPoolRows; ++g) most = fmaxf(most, merged[0][g][threadIdx.x]);
#pragma unroll
      for (int g = 0; g < kPoolRows; ++g) {
        const float kept = weight_of(merged[0][g][threadIdx.x], most);
        weight += merged[1][g][threadIdx.x] * kept;
        sum += merged[2][g][threadIdx.x] * kept;
      }
      a.pooled[static_cast<int64_t>(token) * a.width + blockIdx.y * kPoolChannels + threadIdx.x] = sum / weight;
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
  if (tokens == 0) return;
  a.rows.tokens = static_cast<int>(tokens);
  a.rows.chunk = chunk_for(tokens, a.ratio);
  a.width = static_cast<int>(width);
  a.window = a.ratio * (overlap ? 2 : 1);
  const dim3 grid(ceil_div(tokens, a.rows.chunk), a.width / kPoolChannels);
  launch(call, pool_kernel, grid, kPoolThreads, a);
}

}  // namespace dsv4
