// fn as operands of the tensor cores: in two bf16 terms, in shared memory.
#pragma once
#include "hyper_connection_tile.cuh"

namespace dsv4 {

// A warp's thirty-two columns of eight tokens: lane (g, q) of a group g of eight and a quarter q has token g and eight
// columns from the q-th on, four words of each stream. Two neighbouring words are its part of an operand of sixteen
// columns.
struct Streams {
  uint4 of[kStreams];

  __device__ uint2 operand(int step) const {
    const uint4& v = of[step / 2];
    return step % 2 == 0 ? uint2{v.x, v.y} : uint2{v.z, v.w};
  }
};

// For each stream and step the first terms of sums 0 to 15, the first of 16 to 23 with the second of 0 to 7, the second
// of the others. The head has four sums: both terms in one operand, and eight rows of nothing.
template <Hyper kHyper>
struct Weights {
  static constexpr bool kHead = kHyper == Hyper::head;
  static constexpr int kRows = kHead ? 1 : 3, kGroups = kHead ? kStreams : 8;
  static constexpr int kChunk = 128, kChunks = kColumns / kChunk;  // columns that a warp reads in a row of fn
  static constexpr int kTasks = kStreams * kChunks * kGroups / (kTeams * kWarps), kAtOnce = kHead ? kTasks : 4;
  using Operand = uint4[kTerms<kHyper>][32];

  const Operand* operand;
  int lane;

  __device__ static uint4 operand_of(float4 upper, float4 lower) {
    return {pack_bf16(upper.x, upper.y), pack_bf16(lower.x, lower.y), pack_bf16(upper.z, upper.w),
            pack_bf16(lower.z, lower.w)};
  }
  // What four columns of a group's sums become: a step's operands of one lane.
  __device__ static void make(Operand& to, int lane, int group, const float4 (&v)[kRows]) {
    float4 first[kRows], second[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      split(v[row].x, first[row].x, second[row].x);
      split(v[row].y, first[row].y, second[row].y);
      split(v[row].z, first[row].z, second[row].z);
      split(v[row].w, first[row].w, second[row].w);
    }
    if constexpr (kHead) {
      to[0][group * 4 + lane] = operand_of(first[0], float4{});
      to[0][(group + kStreams) * 4 + lane] = operand_of(second[0], float4{});
    } else {
      to[0][group * 4 + lane] = operand_of(first[0], first[1]);
      to[1][group * 4 + lane] = operand_of(first[2], second[0]);
      to[2][group * 4 + lane] = operand_of(second[1], second[2]);
    }
  }

  // All warps of columns, for all of them; `fn` at the block's first column. A warp reads 512 bytes of each row.
  __device__ static void make_all(Memory<kHyper>& m, const float* fn) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto place = [&](int task, int& stream, int& chunk, int& group) {
      const int i = warp + task * kTeams * kWarps;
      group = i % kGroups, chunk = i / kGroups % kChunks, stream = i / (kGroups * kChunks);
    };
#pragma unroll 1
    for (int begin = 0; begin < kTasks; begin += kAtOnce) {
      float4 v[kAtOnce][kRows];
      int stream, chunk, group;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        place(begin + i, stream, chunk, group);
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const float* from = fn + ((group + row * 8) * kStreams + stream) * kHidden + chunk * kChunk + lane * 4;
          v[i][row] = __ldg(reinterpret_cast<const float4*>(from));
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        place(begin + i, stream, chunk, group);
        const int unit = chunk * 4 + lane / 8, piece = lane % 8;
        make(m.operand[unit][stream * 2 + piece % 2], piece / 2, group, v[i]);
      }
    }
  }

  // Sums of the warp's columns, to its part: lane (g, q) has rows g and g + 8 of tokens 2q and 2q + 1 of each eight.
  __device__ void multiply(const Streams (&now)[kOperands], float (*part)[kValues]) const {
    float sums[kOperands][kTerms<kHyper>][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int term = 0; term < kTerms<kHyper>; ++term) {
        const uint4 a = operand[step][term][lane];
#pragma unroll
        for (int k = 0; k < kOperands; ++k) {
          const uint2 b = now[k].operand(step);
          dsv4::multiply(sums[k][term], a.x, a.y, a.z, a.w, b.x, b.y);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float* to = part[k * kEight + lane % 4 * 2 + t] + lane / 4;
        const auto& s = sums[k];
        if constexpr (kHead) {
          to[0] = s[0][t] + __shfl_xor_sync(kWholeWarp, s[0][t], 16);
        } else {
          to[0] = s[0][t] + s[1][2 + t];
          to[8] = s[0][2 + t] + s[2][t];
          to[16] = s[1][t] + s[2][2 + t];
        }
      }
    }
  }
};

// The products of a token's streams: of tokens with tokens the diagonal, which lanes with q = g / 2 have. In order:
// 00 10 11 02 12 03 13 22 32 33.
__device__ inline void multiply_streams(const Streams& now, float (*part)[kValues], int lane) {
  float products[6][4] = {};
  const auto add = [&](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    multiply_half(products[0], a, b, a);
    multiply_half(products[1], a, b, b);
    multiply_half(products[2], a, b, c);
    multiply_half(products[3], a, b, d);
    multiply_half(products[4], c, d, c);
    multiply_half(products[5], c, d, d);
  };
  add(now.of[0].x, now.of[1].x, now.of[2].x, now.of[3].x);
  add(now.of[0].y, now.of[1].y, now.of[2].y, now.of[3].y);
  add(now.of[0].z, now.of[1].z, now.of[2].z, now.of[3].z);
  add(now.of[0].w, now.of[1].w, now.of[2].w, now.of[3].w);
  const int group = lane / 4;
  if (lane % 4 == group / 2) {
    const auto own = [&](int i, int row) { return group % 2 == 0 ? products[i][row * 2] : products[i][row * 2 + 1]; };
    float* to = part[group] + kSums;
    *reinterpret_cast<float4*>(to) = {own(0, 0), own(0, 1), own(1, 1), own(2, 0)};
    *reinterpret_cast<float4*>(to + 4) = {own(2, 1), own(3, 0), own(3, 1), own(4, 0)};
    *reinterpret_cast<float2*>(to + 8) = {own(4, 1), own(5, 1)};
  }
  __syncwarp();
}

}  // namespace dsv4
