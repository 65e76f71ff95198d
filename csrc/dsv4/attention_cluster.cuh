// How the blocks of a cluster that share the keys of a row merge what they found.
//
// Each finishes some columns of 64 dims, which the others send it. It is the bytes that take the time, so that sums
// travel rounded as o will be. They go to the place of q as soon as the receiver has scored its last tile. A barrier
// there counts them; nobody waits for the whole cluster.
#pragma once
#include "attention_merge.cuh"

namespace dsv4 {

#if __CUDA_ARCH__ >= 900

constexpr uint32_t kColumnBytes = kGroupThreads * 32 * 2;  // a thread's values of a column, all threads'

// By one thread, before others use the barriers. A block receives columns of the others, reference and weight of all.
template <int kParts>
__device__ inline void begin_cluster(Shared& s) {
  begin_barrier(s.vacant, kThreads / 32 * (kParts - 1));
  begin_barrier(s.received, 1);
  expect(s.received, (kParts - 1) * (kColumns / kParts) * kColumnBytes + kParts * kHeads * sizeof(float2));
  publish_barriers();
}

// Which block finishes which columns: some of each warp group, as far as there are as many.
template <int kParts>
struct Shares {
  static constexpr int kEach = kColumns / kParts;
  static constexpr bool kOfBoth = kParts <= kColumns / 2;

  int group;

  // Of one of the warp group's columns.
  __device__ int owner(int column) const {
    return kOfBoth ? column / (kColumns / 2 / kParts) : group * (kColumns / 2) + column;
  }
  // Of those that the owner finishes.
  __device__ int index(int column) const { return kOfBoth ? group * (kEach / 2) + column % (kEach / 2) : 0; }
};

// Sends this thread's values of a column to a place in another block.
__device__ inline void send_column(const float* sum, uint32_t place, uint32_t received) {
  const int thread = threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* v = sum + i * 8;
    send(place + (i * kGroupThreads + thread) * sizeof(uint4),
         uint4{pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])}, received);
  }
}

// Adds what was sent of a column. Pairs are of this thread's two heads in turns.
__device__ inline void add_column(float* sum, const uint8_t* place, const float (&kept)[2]) {
  const int thread = threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = reinterpret_cast<const uint4*>(place)[i * kGroupThreads + thread];
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float* to = sum + i * 8 + pair * 2;
      to[0] = fmaf(__uint_as_float(pairs[pair] << 16), kept[pair % 2], to[0]);
      to[1] = fmaf(__uint_as_float(pairs[pair] & 0xffff0000u), kept[pair % 2], to[1]);
    }
  }
}

template <int kParts>
__device__ inline void merge_in_cluster(const AttentionArguments& a, Shared& s, Running& run, const Sinks& sinks,
                                        int row, int first_head, int group) {
  static_assert(sizeof(s.q) >= (kColumns - 1) * kColumnBytes);
  const int lane = threadIdx.x % 32, head = head_of(), block = blockIdx.y;
  const Shares<kParts> shares{group};
  wait(s.vacant, 0);
#pragma unroll
  for (int column = 0; column < kColumns / 2; ++column) {
    const int to = shares.owner(column);
    if (to == block) continue;
    const int slot = (block < to ? block : block - 1) * shares.kEach + shares.index(column);
    send_column(run.sum + column * 32, place_in(shared_address(s.q) + slot * kColumnBytes, to),
                place_in(shared_address(&s.received), to));
  }
  add_weights(s, run, group, 0);
  if (group == 0 && lane % 4 < 2) {
    const int half = lane % 4;
    const float2 own = half ? float2{run.reference[1], run.weight[1]} : float2{run.reference[0], run.weight[0]};
#pragma unroll
    for (int to = 0; to < kParts; ++to) {
      send(place_in(shared_address(&s.part[block][head + half * 8]), to), own,
           place_in(shared_address(&s.received), to));
    }
  }
  wait(s.received, 0);
  float largest[2] = {-INFINITY, -INFINITY}, own[2], by[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float weight = 0;
#pragma unroll
    for (int from = 0; from < kParts; ++from) {
      const float2 part = s.part[from][head + half * 8];
      if (part.y != 0) largest[half] = fmaxf(largest[half], part.x);
    }
#pragma unroll
    for (int from = 0; from < kParts; ++from) {
      const float2 part = s.part[from][head + half * 8];
      weight += part.y * kept_of(part, largest[half]);
    }
    own[half] = kept_of({run.reference[half], run.weight[half]}, largest[half]);
    by[half] = share(sinks.of[half], largest[half], weight);
  }
#pragma unroll
  for (int column = 0; column < kColumns / 2; ++column) {
    if (shares.owner(column) != block) continue;
    float* sum = run.sum + column * 32;
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] *= own[i / 2 % 2];
#pragma unroll
    for (int other = 0; other < kParts - 1; ++other) {
      const int from = other < block ? other : other + 1;
      const float kept[2] = {kept_of(s.part[from][head], largest[0]), kept_of(s.part[from][head + 8], largest[1])};
      add_column(sum, s.q + (other * shares.kEach + shares.index(column)) * kColumnBytes, kept);
    }
    store_column(a, row, first_head, group * (kColumns / 2) + column, sum, by);
  }
}

#endif

}  // namespace dsv4
