// What the two multiplying warp groups of a block do with the tiles of a row.
//
// They take tiles in turns: the owner scores a tile's keys and weighs them, and leaves the weights and the score that
// they refer to in shared memory; then each sums its half of the dims, weighted so, and the owner has them in registers
// already. While an owner makes weights of scores, the tensor cores work for the other group.
#pragma once
#include <cstddef>

#include "attention_block.cuh"

namespace dsv4 {

// What a thread keeps of its two heads (lane / 4, and 8 further) through the tiles of a row.
struct Running {
  float reference[2] = {-INFINITY, -INFINITY};  // the score of weight 1, to base 2
  float weight[2] = {0, 0};                     // of this thread's keys in tiles that its warp group owns
  float sum[kHalf / 2] = {};                    // of this warp group's dims
};

// Named barriers: the weights of each warp group are there; those that multiply are together.
enum Barrier : int { kWeighed = 1, kTogether = 3 };

// Weights may be so much larger than 1, to base 2, before they refer to a new largest score.
constexpr float kSlack = 8;

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same for all threads of a warp, and known to be: descriptors of tensor cores live in uniform registers.
__device__ inline int warp_group() { return __shfl_sync(kWholeWarp, threadIdx.x / kGroupThreads, 0); }
__device__ inline int head_of() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// Weights refer to another score from now on; sums follow by `scale_sums`.
__device__ inline void refer(Running& run, int half, float now, float (&kept)[2]) {
  kept[half] = 1;
  if (now != run.reference[half]) {
    kept[half] = exp2_of(run.reference[half] - now);
    run.reference[half] = now;
    run.weight[half] *= kept[half];
  }
}
__device__ inline void scale_sums(Running& run, const float (&kept)[2]) {
  if (__any_sync(kWholeWarp, kept[0] != 1.0f || kept[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) run.sum[i] *= kept[i / 2 % 2];
  }
}

// Scores of keys that are not there become -inf.
__device__ inline void mask(const Shared& s, int stage, float (&score)[kTile / 2]) {
  const int lane = threadIdx.x % 32;
  // Lane l looks at keys 2l and 2l + 1.
  const bool own = lane < kTile / 2;
  const uint16_t flags = *reinterpret_cast<const uint16_t*>(s.there[stage] + (own ? 2 * lane : 0));
  const uint32_t even = __ballot_sync(kWholeWarp, flags & 1), odd = __ballot_sync(kWholeWarp, flags >> 8);
  if ((even & odd) == kWholeWarp) return;
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) {
    if (!((i % 2 ? odd : even) >> (i / 4 * 4 + lane % 4) & 1)) score[i] = -INFINITY;
  }
}

// Scores become weights: in registers as they are multiplied, and in shared memory for the other warp group.
__device__ inline void weigh(const AttentionArguments& a, Shared& s, Running& run, int group, float (&score)[kTile / 2],
                             uint32_t (&weights)[kTile / 4], float (&kept)[2]) {
  const int lane = threadIdx.x % 32, head = head_of();
  mask(s, group, score);
  float most[2] = {-INFINITY, -INFINITY}, shift[2];
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) most[i / 2 % 2] = fmaxf(most[i / 2 % 2], score[i]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float now = group_max<4>(most[half]) * a.scale;
    // The first key's, too: -inf before it.
    refer(run, half, now > run.reference[half] + kSlack ? now : run.reference[half], kept);
    if (lane % 4 == 0) s.reference[group][head + half * 8] = run.reference[half];
    shift[half] = run.reference[half] == -INFINITY ? 0.0f : run.reference[half];
  }
  uint8_t* row = s.weights[group] + head * kRowBytes + lane % 4 * 4;  // and eight rows further: the same permutation
#pragma unroll
  for (int pair = 0; pair < kTile / 4; ++pair) {
    const int half = pair % 2;
    const float first = exp2_of(fmaf(score[pair * 2], a.scale, -shift[half]));
    const float second = exp2_of(fmaf(score[pair * 2 + 1], a.scale, -shift[half]));
    run.weight[half] += first + second;
    weights[pair] = pack_bf16(first, second);
    *reinterpret_cast<uint32_t*>(row + half * 8 * kRowBytes + ((pair / 2 ^ (head & 7)) << 4)) = weights[pair];
  }
}

// Addresses of operands, the same for all threads of a warp.
struct Operands {
  uint32_t q[2], own_keys[2];  // columns of the dims that this warp group sums, and of the others
  uint32_t own_values, other_values, other_weights;

  __device__ Operands(const Shared& s, int group) {
    const uint32_t base = __shfl_sync(kWholeWarp, shared_address(&s), 0);
    const uint32_t stage = kColumns * Shared::kKeyColumn, half = group * (kColumns / 2) * Shared::kKeyColumn;
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const uint32_t first = (group ^ turn) * (kColumns / 2);
      q[turn] = base + offsetof(Shared, q) + first * Shared::kHeadColumn;
      own_keys[turn] = base + offsetof(Shared, keys) + group * stage + first * Shared::kKeyColumn;
    }
    own_values = own_keys[0];
    other_values = base + offsetof(Shared, keys) + (1 - group) * stage + half;
    other_weights = base + offsetof(Shared, weights) + (1 - group) * Shared::kHeadColumn;
  }
};

// Starts the sums over a tile that the other warp group owns.
__device__ inline void start_other(Shared& s, Running& run, const Operands& at, int group) {
  const int head = head_of();
  named_sync(kWeighed + 1 - group, kConsumers);
  float kept[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) refer(run, half, s.reference[1 - group][head + half * 8], kept);
  scale_sums(run, kept);
  begin_products();
  add_products_across_rows<kTile>(run.sum, at.other_weights, at.other_values);
  commit_products();
}

// A tile that this warp group owns, and first the sums over the one before it, if the row has one. The tensor cores
// take scores after those sums, so that place is free early: scores first, with the sums behind them, were slower.
template <int kParts>
__device__ inline void attend_own(const AttentionArguments& a, Shared& s, Running& run, const Operands& at, int group,
                                  uint32_t tile, bool first, bool last) {
  if (!first) start_other(s, run, at, group);
  float score[kTile / 2] = {};
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    wait(s.filled[group][turn], tile / kStages);
    publish();  // what other warps stored or copied
    begin_products();
#pragma unroll
    for (int column = 0; column < kColumns / 2; ++column) {
      add_products_of_rows<kTile>(score, at.q[turn] + column * s.kHeadColumn,
                                  at.own_keys[turn] + column * s.kKeyColumn);
    }
  }
  commit_products();
  wait_products<1>();
  if (!first) arrive(s.emptied[1 - group][group]);
  wait_products<0>();
  if (last) {
    arrive(s.q_emptied);
    vacate_q<kParts>(s);
  }
  uint32_t weights[kTile / 4];
  float kept[2];
  weigh(a, s, run, group, score, weights, kept);
  publish();
  named_arrive(kWeighed + group, kConsumers);
  scale_sums(run, kept);
  begin_products();
  add_products_across_rows<kTile>(run.sum, weights, at.own_values);
  commit_products();
  wait_products<0>();
  arrive(s.emptied[group][group]);
}

// All tiles of a row; `from` counts those of the rows before.
template <int kParts>
__device__ inline void attend(const AttentionArguments& a, Shared& s, Running& run, const Operands& at, int group,
                              uint32_t from, uint32_t tiles) {
  const uint32_t end = from + tiles;
  if (tiles == 0 || (tiles == 1 && from % 2 != group)) {  // none to score
    if (tiles == 1) arrive(s.q_emptied);
    vacate_q<kParts>(s);
  }
  for (uint32_t tile = from + (from + group) % 2; tile < end; tile += 2) {
    attend_own<kParts>(a, s, run, at, group, tile, tile == from, tile + 2 >= end);
  }
  if (tiles > 0 && (end - 1) % 2 != group) {
    start_other(s, run, at, group);
    wait_products<0>();
    arrive(s.emptied[1 - group][group]);
  }
}

}  // namespace dsv4
