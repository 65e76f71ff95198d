// What compressors read: states of a request's positions, pooled by softmax, for the rows that complete a group.
#pragma once
#include "launch.cuh"
#include "numeric.cuh"
#include "pages.cuh"

namespace dsv4 {

constexpr int kChannels = 4;  // of a thread: one 16-byte access of float32

struct States {
  const float* base;
  int64_t block_stride;  // in floats
  const int32_t* table;
  int64_t table_stride;
  int rows, width;  // of a block, and of a row: kv, then score
  Divisor blocks;   // positions to blocks
};

// The row of a request's position; the caller has made sure that there is one.
__device__ inline const float* state_row(const States& s, int request, int64_t position) {
  const auto at = static_cast<uint32_t>(position);
  const uint32_t place = s.blocks.quotient(at);
  const int64_t block = max(0, s.table[request * s.table_stride + place]);
  return s.base + block * s.block_stride + (at - place * s.rows) * s.width;
}

__device__ inline float at(const float4& v, int c) { return c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w; }

// Softmax-gated sum of some rows, channel by channel, as far as it has come.
struct Pooled {
  float most[kChannels], weight[kChannels], sum[kChannels];
};

__device__ inline Pooled nothing_pooled() {
  Pooled p;
#pragma unroll
  for (int i = 0; i < kChannels; ++i) p.most[i] = -INFINITY, p.weight[i] = 0, p.sum[i] = 0;
  return p;
}
__device__ inline float weight_of(float score, float most) { return score == -INFINITY ? 0.0f : __expf(score - most); }

template <int kRows>
__device__ void pool(Pooled& p, const float4 (&kv)[kRows], const float4 (&score)[kRows]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    float most = p.most[c];
#pragma unroll
    for (int r = 0; r < kRows; ++r) most = fmaxf(most, at(score[r], c));
    const float kept = weight_of(p.most[c], most);
    float weight = p.weight[c] * kept, sum = p.sum[c] * kept;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float w = weight_of(at(score[r], c), most);
      weight += w;
      sum = fmaf(w, at(kv[r], c), sum);
    }
    p.most[c] = most, p.weight[c] = weight, p.sum[c] = sum;
  }
}

// Loads one thread's channels of a row; a position before the first weighs nothing, whatever lies there.
__device__ inline void load_row(const States& s, int request, int64_t position, int column, float4& kv, float4& score) {
  kv = float4{};
  score = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  if (position < 0) return;
  const float* row = state_row(s, request, position) + column;
  kv = *reinterpret_cast<const float4*>(row);
  score = *reinterpret_cast<const float4*>(row + s.width / 2);
}

// Where the rows go, and what they are; `request` may be null.
struct Rows {
  const int64_t* slots;
  const int64_t* positions;
  const int32_t* request;
  int tokens, chunk;  // rows a unit looks at, at most 32
};

// Calls body(token, slot, position, request) for the rows of a unit's chunk that have a slot. What it is told is loaded
// for all of them at once.
template <class Body>
__device__ void for_each_slot(const Rows& rows, int unit, Body body) {
  const int lane = threadIdx.x % 32, first = unit * rows.chunk;
  int64_t slot = -1, position = 0;
  int request = 0;
  if (lane < rows.chunk && first + lane < rows.tokens) {
    slot = rows.slots[first + lane];
    position = rows.positions[first + lane];
    if (rows.request) request = rows.request[first + lane];
  }
  for (uint32_t left = __ballot_sync(kWholeWarp, slot >= 0); left; left &= left - 1) {
    const int at = __ffs(left) - 1;
    body(first + at, __shfl_sync(kWholeWarp, slot, at), __shfl_sync(kWholeWarp, position, at),
         __shfl_sync(kWholeWarp, request, at));
  }
}

// Rows a unit looks at. One in four has a slot in C4; one in 128 in C128. Few rows have units of their own.
inline int chunk_for(int64_t tokens, int ratio) {
  constexpr int kFewRows = 64, kMost = 32;
  if (tokens <= kFewRows) return 1;
  return ratio < kMost ? ratio : kMost;
}

inline States read_states(Reader& r, Rows& rows_of_call, int64_t& tokens) {
  int64_t blocks = kUnbound, rows = kUnbound, width = kUnbound, requests = kUnbound, listed = kUnbound;
  const Operand& state = r.strided("state", {DType::f32}, {&blocks, &rows, &width});
  r.require(state.stride[0] % kChannels == 0 || blocks < 2, "state", "has an unaligned page stride",
            "align pages to 16 bytes");
  const Operand& table = r.strided("table", {DType::i32}, {&requests, &listed}, 4);
  rows_of_call.positions = r.in("positions", {DType::i64}, {&tokens}, 8).as<const int64_t>();
  rows_of_call.request = r.in("request", {DType::i32}, {&tokens}, 4).as<const int32_t>();
  return {state.as<const float>(), state.stride[0],         table.as<const int32_t>(),           table.stride[0],
          static_cast<int>(rows),  static_cast<int>(width), Divisor(static_cast<uint32_t>(rows))};
}

}  // namespace dsv4
