// The products of a tile's mixed streams with fn: eight warps, thirty-two columns each.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"
#include "tensor_core.cuh"

namespace dsv4::resident {

// The value, in a way that ptxas cannot take again: it would ask for the thread's number wherever that is used.
__device__ inline int kept(int v) { return __shfl_sync(kWholeWarp, v, threadIdx.x % 32); }

// Eight columns of the four streams are four matrices, and two steps of fn's products: of the first two streams and of
// the last two. fn stays in registers, as their first operands.
struct Multiplication {
  static constexpr int kChunks = kWarpColumns / kVector, kPairs = kStreams / 2;

  Memory& m;
  const int warp = kept(threadIdx.x / 32) - kFirst, lane = kept(threadIdx.x % 32);
  const int group = lane / 4, quarter = lane % 4;
  // For each chunk and pair the first terms of sums 0 to 15, both of 16 to 23, the second of 0 to 15.
  uint32_t weights[kChunks][kPairs][3][4];

  __device__ explicit Multiplication(Memory& memory) : m(memory) {}

  // The warp's part of fn, in two bf16 terms.
  __device__ void take() {
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      wait(m.weights[j], 0);
      const uint8_t* from = m.streams[kFree] + j * kPartBytes + (warp * kSums + group) * kRow + quarter % 2 * 8;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        uint32_t first[3], second[3];
#pragma unroll
        for (int row = 0; row < 3; ++row) {
          const float2 v =
              *reinterpret_cast<const float2*>(from + row * 8 * kRow + ((c * 2 + quarter / 2) ^ group) * 16);
          split(v.x, v.y, first[row], second[row]);
        }
        auto& w = weights[c][j / 2];
        const int at = j % 2 * 2;
        w[0][at] = first[0], w[0][at + 1] = first[1];
        w[1][at] = first[2], w[1][at + 1] = second[2];
        w[2][at] = second[0], w[2][at + 1] = second[1];
      }
      __syncwarp();
      if (lane == 0) arrive(m.taken[j]);
    }
  }

  __device__ void multiply_sums(const uint32_t (&v)[kChunks][4], float (*part)[kPartValues]) const {
    float s[3][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
        for (int term = 0; term < 3; ++term) {
          const auto& a = weights[c][pair][term];
          multiply(s[term], a[0], a[1], a[2], a[3], v[c][pair * 2], v[c][pair * 2 + 1]);
        }
      }
    }
    const uint32_t own_lane = lane_again();
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      float* to = part[own_lane % 4 * 2 + t] + own_lane / 4;
      to[0] = s[0][t] + s[2][t];
      to[8] = s[0][2 + t] + s[2][2 + t];
      to[16] = s[1][t] + s[1][2 + t];
    }
  }

  __device__ void run(int tiles) const {
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      const uint32_t slot = n % kSlots;
      wait(m.mixed[slot], n / kSlots % 2);
      if (n >= 2) wait(m.empty[n % 2], (n / 2 - 1) & 1);
      const uint32_t own_lane = lane_again();
      const uint32_t from = shared_place(m.streams) + slot * kSlotBytes + warp / 2 * kGroupBytes +
                            place_of_chunk(own_lane % 8, own_lane / 8, warp % 2 * kChunks);
      uint32_t v[kChunks][4];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) load_matrices(v[c], from ^ (c * 16));
      auto* part = m.part[n % 2][warp];
      multiply_sums(v, part);
      __syncwarp();
      if (lane_again() == 0) arrive(m.full[n % 2]);
    }
  }
};

}  // namespace dsv4::resident
