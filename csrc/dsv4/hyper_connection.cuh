// What the kernels of the hyper-connections share: their arguments, and products of sixteen tokens with the weights.
#pragma once
#include "call.h"
#include "numeric.cuh"

namespace dsv4 {

constexpr int kStreams = 4;
constexpr int kSums = (2 + kStreams) * kStreams;  // 24: pre, post, comb row by row
constexpr int kTokens = 16;                       // the rows of m16n8k16
constexpr int kSumTiles = kSums / 8;

// What is launched: the streams mixed and read, read only, or read for the last time.
enum class Hyper { post_pre, pre, head };

// The rows of fn: the head has those of pre only.
template <Hyper kHyper>
constexpr int kSumsOf = kHyper == Hyper::head ? kStreams : kSums;

// What becomes of the streams.
struct MixArguments {
  const uint4* residual;  // [tokens, 4, H] bf16
  const float4* post;     // [tokens, 4]
  const float4* comb;     // [tokens, 4, 4]
  const uint4* y;         // [tokens, H] bf16
  const float* fn;        // [sums, 4 H]
  uint4* mixed;           // [tokens, 4, H] bf16
  uint8_t* partial;       // rows of layer_in: [H / 256, 25] float32 each
  int tokens, hidden, sums, steps;
};

// What the next block reads, and the weights of its output.
struct CollapseArguments {
  const uint4* mixed;  // [tokens, 4, H] bf16
  const float* base;   // [sums]
  const float* scale;  // [3], or [1] of the head
  const void* norm_weight;
  uint4* layer_in;  // [tokens, H] bf16; partial sums until they are read
  float* post;      // [tokens, 4]; the head has none
  float* comb;      // [tokens, 4, 4]; the head has none
  float eps, hc_eps;
  int hidden, parts, iterations;
  bool weight_is_bf16;
};

// One launch for both, mixing and collapsing, where the device has clusters of sixteen blocks and the hidden size is
// 4096; false elsewhere. The first is for all but few tokens and the head: streams stay in shared memory.
bool launch_resident(const Call& call, const MixArguments& mix, const CollapseArguments& collapse, Hyper hyper);
bool launch_in_clusters(const Call& call, const MixArguments& mix, const CollapseArguments& collapse, Hyper hyper);

#ifdef __CUDACC__
// Two bf16 terms of a weight: 16 bits of mantissa. Packed, which is a quick instruction; one alone is converted slowly.
__device__ inline void split(float v, float& first, float& second) {
  first = low(pack_bf16(v, v));
  second = v - first;
}
// Of two weights, each term packed.
__device__ inline void split(float one, float other, uint32_t& first, uint32_t& second) {
  first = pack_bf16(one, other);
  second = pack_bf16(one - low(first), other - high(first));
}

__device__ inline void multiply(float (&s)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same over eight values.
__device__ inline void multiply_half(float (&s)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "r"(a0), "r"(a1), "r"(b));
}
#endif

}  // namespace dsv4
