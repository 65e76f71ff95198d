// The products of a tile's mixed streams with fn: four warps, sixteen tokens each.
#pragma once
#include "hyper_connection_staged.cuh"
#include "hyper_connection_staged_access.cuh"

namespace dsv4::staged {

// s[64 x 48] += a b^T over the 64 values of a column.
__device__ inline void add_sums(float (&s)[kTermRows / 2], uint32_t a, uint32_t b) {
#ifdef DSV4_WGMMA
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, 1, 0; wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, %24, %25, add, 1, 1, "
        "0, 0; }"
        : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]), "+f"(s[7]), "+f"(s[8]),
          "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]), "+f"(s[14]), "+f"(s[15]), "+f"(s[16]),
          "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]), "+f"(s[21]), "+f"(s[22]), "+f"(s[23])
        : "l"(descriptor(a) + (step * 32 >> 4)), "l"(descriptor(b) + (step * 32 >> 4)));
  }
#else
  add_products_of_rows<kTermRows>(s, a, b);
#endif
}

// fn's rows in two bf16 terms, as the tensor cores read them, made by the warps that do not mix. Of a row, 64 columns
// come to where their first and second terms will be.
struct Weights {
  static constexpr int kWarps = kMultipliers + kOwners, kEach = 128;  // columns that a warp reads in a row
  static constexpr int kTasks = kSums * kStreams * kColumns / kEach;

  Memory& m;
  const int warp = threadIdx.x / 32 - kMixers, lane = threadIdx.x % 32, piece = lane % 16;

  // In the tile of the task's stream and the lane's stage.
  __device__ uint8_t* place(int task, int term, int chunk) const {
    const int line = task / 2, sum = line / kStreams, stream = line % kStreams;
    return m.fn[task % 2 * 2 + lane / 16][stream] + swizzled(sum + term * kSums, chunk);
  }
  __device__ void fetch(const float* fn) const {
#pragma unroll 1
    for (int task = warp; task < kTasks; task += kWarps) {
      copy_in(place(task, piece / 8, piece % 8), fn + task / 2 * kHidden + task % 2 * kEach + lane * 4);
    }
  }
  __device__ void make() const {
    wait_for_copies();
#pragma unroll 4
    for (int task = warp; task < kTasks; task += kWarps) {
      __syncwarp();
      const float4 v = *reinterpret_cast<const float4*>(place(task, piece / 8, piece % 8));
      float4 first, second;
      split(v.x, first.x, second.x);
      split(v.y, first.y, second.y);
      split(v.z, first.z, second.z);
      split(v.w, first.w, second.w);
      __syncwarp();
      const int half = piece % 2 * 8;
      *reinterpret_cast<uint2*>(place(task, 0, piece / 2) + half) = {pack_bf16(first.x, first.y),
                                                                     pack_bf16(first.z, first.w)};
      *reinterpret_cast<uint2*>(place(task, 1, piece / 2) + half) = {pack_bf16(second.x, second.y),
                                                                     pack_bf16(second.z, second.w)};
    }
    publish();
  }
};

struct Multiplication {
  Memory& m;
  const Share& share;
  const int warp = threadIdx.x / 32 % kMultipliers, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;

  // To the blocks that own the tokens. A term's sums lie three eights of columns behind the other's.
  __device__ void send_sums(const float (&s)[kTermRows / 2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = warp * 16 + half * 8 + group;
      const uint32_t to = place_of(m, share, token), barrier = place_at(&m.sums, token / kOwned);
#pragma unroll
      for (int t = 0; t < kSumTiles; ++t) {
        const float *first = s + t * 4 + half * 2, *second = first + kSums / 2;
        send(to + (t * 8 + quarter * 2) * 4, float2{first[0] + second[0], first[1] + second[1]}, barrier);
      }
    }
  }
  __device__ void run() const {
    int n = 0;
    for (int i = 0; i < share.tiles; ++i) {
      float sums[kTermRows / 2] = {};
#pragma unroll 1
      for (int stage = 0; stage < kStages; ++stage, ++n) {
        const int slot = n % kSlots;
        const uint32_t streams = shared_place(m.streams[slot]), weights = shared_place(m.fn[stage]);
        wait(m.mixed[slot], n / kSlots & 1);
        publish();  // what the others have stored, to the tensor cores
        begin_products();
#pragma unroll
        for (int j = 0; j < kStreams; ++j) {
          add_sums(sums, streams + j * kColumnBytes, weights + j * (kTermRows * kRowBytes));
        }
        commit_products();
        wait_products<0>();
        __syncwarp();
        if (lane == 0) arrive(m.multiplied[slot]);
      }
      send_sums(sums);
    }
  }
};

}  // namespace dsv4::staged
