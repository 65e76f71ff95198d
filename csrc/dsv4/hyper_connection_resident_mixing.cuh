// The streams of a tile mixed in place, by tensor cores: a warp has two tokens and half of the block's columns. Of
// eight columns it multiplies the two tokens' rows of streams and all eight tokens' rows of the block's output; what
// comes out are the two tokens' rows. Weights are the first operand, in two bf16 terms, each in rows of its own, with
// zeros where a row is another token's: they have 16 bits of mantissa, where the kernel for few tokens has all 24.
//
// Zero times what is not finite is NaN, which would reach the neighbours. So where one comes out, tokens are mixed one
// by one, from what is still there: others' terms are zeros in both ways, and add up to the same bits.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"
#include "tensor_core.cuh"

namespace dsv4::resident {

template <Hyper kHyper>
struct Mixing {
  static constexpr int kPairTokens = 2, kParts = kMixers * kPairTokens / kTile;  // of the columns
  static constexpr int kPartGroups = kGroups / kParts, kSteps = 2 * kPartGroups;

  Memory& m;
  const int warp = threadIdx.x / 32 - kFirst - kMultipliers, pair = warp / kParts, lane = threadIdx.x % 32;
  uint32_t streams_place, layer_place, mixed_place, comb_place, post_place;

  // Matrices that are loaded: of a chunk streams and outputs, and of the next; those that are stored: four chunks.
  __device__ explicit Mixing(Memory& memory) : m(memory) {
    const int row = lane % 8, matrix = lane / 8, token = pair * kPairTokens + row / kStreams, stream = row % kStreams;
    const uint32_t part = warp % kParts * kPartGroups * kGroupBytes;
    streams_place = shared_place(m.streams) + part + place_of_chunk(token, stream, matrix / 2);
    layer_place = shared_place(m.layer) + part + place_of_layer_chunk(row, matrix / 2);
    mixed_place = shared_place(m.streams) + part + place_of_chunk(token, stream, matrix);
    const int group = lane / 4, own = pair * kPairTokens + group / kStreams;
    comb_place = shared_place(m.comb) + own * kStreams * 16 + lane % 2 * 32 + group % kStreams * 4;
    post_place = shared_place(m.post) + own * 16 + group % kStreams * 4;
  }

  // Of two weights, both terms of each, where the lane's token has them.
  __device__ static void take(float one, float other, uint32_t own, uint32_t& first, uint32_t& second) {
    const uint32_t upper = pack_bf16(one, other);
    second = pack_bf16(one - low(upper), other - high(upper)) & own;
    first = upper & own;
  }
  __device__ static uint32_t mixed(const uint32_t (&weights)[4], uint32_t streams, uint32_t layer) {
    float s[4] = {};
    multiply(s, weights[0], weights[1], weights[2], weights[3], streams, layer);
    return pack_bf16(s[0] + s[2], s[1] + s[3]);
  }
  // Of one token: where it is infinite, its weights' second terms make NaN of it.
  __device__ static uint32_t mixed_alone(const uint32_t (&weights)[4], uint32_t streams, uint32_t layer) {
    float s[4] = {};
    multiply(s, weights[0], weights[1], weights[2], weights[3], streams, layer);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float both = s[i] + s[2 + i];
      s[i] = both != both ? s[i] : both;
    }
    return pack_bf16(s[0], s[1]);
  }
  // Where the step-th four chunks are.
  __device__ static uint32_t at(uint32_t tile, int step) { return (tile + step / 2 * kGroupBytes) ^ (step % 2 * 64); }
  __device__ static void load(uint32_t (&v)[2][4], uint32_t from) {
    load_matrices<true>(v[0], from);
    load_matrices<true>(v[1], from ^ 32);
  }
  // NaN where one is.
  __device__ static uint32_t largest(uint32_t one, uint32_t other) {
    uint32_t found;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(one), "r"(other));
    return found;
  }
  __device__ static bool is_nan(uint32_t pair) {
    return (pair & 0x7fff) > 0x7f80 || (pair & 0x7fff0000) > 0x7f800000;
  }

  // One token after the other.
  __device__ void mix_apart(uint32_t from, uint32_t to, const uint32_t (&weights)[4]) const {
    uint32_t own_lane;  // asked for again: what follows from it is not to be kept
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(own_lane));
    const uint32_t first = own_lane % 4 / 2 == 0 ? 0xffffffff : 0;
    const bool of_pair = own_lane % 4 == pair;
    const uint32_t first_layer = of_pair ? 0x0000ffff : 0, second_layer = of_pair ? 0xffff0000 : 0;
    const bool second = own_lane / 4 >= kStreams;
    uint32_t v[2][4], out[4];
    load(v, from);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t streams = v[c / 2][c % 2 * 2], layer = v[c / 2][c % 2 * 2 + 1];
      const uint32_t one = mixed_alone(weights, streams & first, layer & first_layer);
      const uint32_t other = mixed_alone(weights, streams & ~first, layer & second_layer);
      out[c] = second ? other : one;
    }
    store_matrices(to, out);
  }

  __device__ void mix_tile(uint32_t slot, uint32_t layer_slot) const {
    const uint32_t comb = comb_place + layer_slot * (kTile * kStreams * 16);
    const uint32_t post = post_place + layer_slot * (kTile * 16);
    const float by[3] = {load_shared_float(comb), load_shared_float(comb + 16), load_shared_float(post)};
    const uint32_t to = mixed_place + slot * kSlotBytes;
    const bool of_layer = lane / 8 % 2 != 0;
    const uint32_t from = of_layer ? layer_place + layer_slot * kLayerBytes : streams_place + slot * kSlotBytes;
    uint32_t v[2][2][4], out[2][4], weights[4], left = 0;
    load(v[0], at(from, 0));
    load(v[1], at(from, 1));
    const int group = lane / 4, quarter = lane % 4;
    take(by[0], by[1], quarter / 2 == group / kStreams ? 0xffffffff : 0, weights[0], weights[1]);
    take(by[2], by[2], quarter != pair ? 0 : group / kStreams == 0 ? 0x0000ffff : 0xffff0000, weights[2], weights[3]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& in = v[step % 2];
      auto& o = out[step % 2];
#pragma unroll
      for (int c = 0; c < 4; ++c) o[c] = mixed(weights, in[c / 2][c % 2 * 2], in[c / 2][c % 2 * 2 + 1]);
      if (step + 2 < kSteps) load(v[step % 2], at(from, step + 2));
      const bool bad = is_nan(largest(largest(o[0], o[1]), largest(o[2], o[3])));
      if (__any_sync(kWholeWarp, bad)) {
        left |= 1u << step;
      } else {
        store_matrices(at(to, step), o);
      }
    }
    if (left != 0) {
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        if (left >> step & 1) mix_apart(at(from, step), at(to, step), weights);
      }
    }
  }

  __device__ void run(int tiles) const {
    uint32_t slot = 0, parity = 0, layer_slot = 0;
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(m.there[slot], parity);
      if constexpr (kHyper == Hyper::post_pre) mix_tile(slot, layer_slot);
      __syncwarp();
      if (lane == 0) arrive(m.mixed[slot]);
      if (++slot == kSlots) slot = 0, parity ^= 1;
      if (++layer_slot == kLayers) layer_slot = 0;
    }
  }
};

}  // namespace dsv4::resident
