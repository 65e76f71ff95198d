// What becomes of a row's sums: divided and stored, or merged with those of other blocks that have other keys of it.
//
// Blocks that share a row are a cluster where the device has clusters, and merge by themselves (attention_cluster.cuh).
// Else, and where the caller wants it so, they leave their parts in scratch, and a second kernel merges. Parts are
// always added in the same order.
#pragma once
#include "attention_tiles.cuh"

namespace dsv4 {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kPartial = kWidth + 2;

// The whole weight of each head, from both warp groups. Rows take turns with the place for it.
__device__ inline void add_weights(Shared& s, Running& run, int group, int turn) {
  const int lane = threadIdx.x % 32, head = head_of();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float own = group_sum<4>(run.weight[half]);
    if (lane % 4 == 0) s.weight[turn][group][head + half * 8] = own;
  }
  named_sync(kTogether, kConsumers);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    run.weight[half] = s.weight[turn][0][head + half * 8] + s.weight[turn][1][head + half * 8];
  }
}

// Sinks of a thread's heads; asked for before a row's tiles, and there when they are done.
struct Sinks {
  float of[2];

  __device__ Sinks(const AttentionArguments& a, int first_head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) of[half] = a.sink[min(first_head + head_of() + half * 8, a.padded - 1)];
  }
};

// One over a head's weight and its sink's. Without a key there is nothing to weigh.
__device__ inline float share(float sink, float reference, float weight) {
  return weight == 0 ? 0.0f : 1.0f / (weight + exp2f(sink * kLog2e - reference));
}

// What is left of a part's sums and weight when they refer to another score. A part without keys weighs nothing.
__device__ inline float kept_of(float2 part, float reference) { return part.y == 0 ? 0.0f : exp2f(part.x - reference); }

// What four neighbouring lanes hold of four pairs, each of another part of 16 bytes, so that each has one of the parts.
__device__ inline uint4 gathered(const uint32_t (&pair)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(kWholeWarp, odd ? pair[0] : pair[1], 1);
  const uint32_t b = __shfl_xor_sync(kWholeWarp, odd ? pair[2] : pair[3], 1);
  // Parts 0 and 2 of even lanes, 1 and 3 of odd ones: this lane's pair and its neighbour's, in the order of lanes.
  const uint2 low{odd ? a : pair[0], odd ? pair[1] : a}, high{odd ? b : pair[2], odd ? pair[3] : b};
  const uint2 sent = upper ? low : high, kept = upper ? high : low;
  const uint2 got{__shfl_xor_sync(kWholeWarp, sent.x, 2), __shfl_xor_sync(kWholeWarp, sent.y, 2)};
  return upper ? uint4{got.x, got.y, kept.x, kept.y} : uint4{kept.x, kept.y, got.x, got.y};
}

// A column of 64 dims, as bf16.
__device__ inline void store_column(const AttentionArguments& a, int row, int first_head, int column,
                                    const float* sum, const float (&by)[2]) {
  const int lane = threadIdx.x % 32, head = first_head + head_of();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = head + half * 8;
    uint4* o = a.o + (static_cast<int64_t>(row) * a.padded + own) * (kWidth / kVector) + column * 8 + lane % 4;
#pragma unroll
    for (int four = 0; four < 2; ++four) {
      uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* from = sum + (four * 4 + i) * 4 + half * 2;
        pair[i] = pack_bf16(from[0] * by[half], from[1] * by[half]);
      }
      // Lane c gets the part of its number: chunk 4 * four + c.
      const uint4 chunk = gathered(pair);
      if (own < a.padded) o[four * 4] = chunk;
    }
  }
}

__device__ inline void store(const AttentionArguments& a, const Running& run, const Sinks& sinks, int row,
                             int first_head, int group) {
  const float by[2] = {share(sinks.of[0], run.reference[0], run.weight[0]),
                       share(sinks.of[1], run.reference[1], run.weight[1])};
#pragma unroll
  for (int column = 0; column < kColumns / 2; ++column) {
    store_column(a, row, first_head, group * (kColumns / 2) + column, run.sum + column * 32, by);
  }
}

__device__ inline void store_part(const AttentionArguments& a, const Running& run, int row, int first_head, int group) {
  const int lane = threadIdx.x % 32, head = first_head + head_of();
  const int64_t parts = static_cast<int64_t>(row) * a.parts.by + blockIdx.y;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = head + half * 8;
    if (own >= a.padded) continue;
    float* to = a.partial + (parts * a.padded + own) * kPartial;
#pragma unroll
    for (int i = 0; i < kHalf / 8; ++i) {
      const int dim = group * kHalf + i * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to + dim) = {run.sum[i * 4 + half * 2], run.sum[i * 4 + half * 2 + 1]};
    }
    if (group == 0 && lane % 4 == 0) *reinterpret_cast<float2*>(to + kWidth) = {run.reference[half], run.weight[half]};
  }
}

constexpr int kMergeThreads = 128;
constexpr int kMostSplits = 32;

// Merges the parts of one head of a row. A lane knows the part of its number.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ AttentionArguments a) {
  after_predecessor();
  const int row = blockIdx.x, head = blockIdx.y, lane = threadIdx.x % 32;
  const int64_t step = static_cast<int64_t>(a.padded) * kPartial;
  const float* parts = a.partial + (static_cast<int64_t>(row) * a.parts.by * a.padded + head) * kPartial;
  float2 own{-INFINITY, 0};
  if (lane < static_cast<int>(a.parts.by)) own = *reinterpret_cast<const float2*>(parts + lane * step + kWidth);
  const float largest = group_max<32>(own.x);
  const float kept = kept_of(own, largest);
  const float weight = group_sum<32>(own.y * kept);
  float sum[4] = {};
#pragma unroll 4
  for (int i = 0; i < static_cast<int>(a.parts.by); ++i) {
    const float by = __shfl_sync(kWholeWarp, kept, i);
    if (by == 0) continue;  // nothing was written there
    const float2 a0 = *reinterpret_cast<const float2*>(parts + i * step + threadIdx.x * 4);
    const float2 a1 = *reinterpret_cast<const float2*>(parts + i * step + threadIdx.x * 4 + 2);
    sum[0] = fmaf(a0.x, by, sum[0]), sum[1] = fmaf(a0.y, by, sum[1]);
    sum[2] = fmaf(a1.x, by, sum[2]), sum[3] = fmaf(a1.y, by, sum[3]);
  }
  const float by = share(a.sink[head], largest, weight);
  uint2* o = reinterpret_cast<uint2*>(a.o + (static_cast<int64_t>(row) * a.padded + head) * (kWidth / kVector));
  o[threadIdx.x] = {pack_bf16(sum[0] * by, sum[1] * by), pack_bf16(sum[2] * by, sum[3] * by)};
}

}  // namespace dsv4
