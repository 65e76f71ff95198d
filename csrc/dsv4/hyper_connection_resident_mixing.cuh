// The streams of a tile mixed in place, by tensor cores: a warp has two tokens and half of the block's columns. Of
// eight columns it multiplies the two tokens' rows of streams and all eight tokens' rows of the block's output; what
// comes out are the two tokens' rows. Weights are the first operand, in two bf16 terms, each in rows of its own, with
// zeros where a row is another token's: they have 16 bits of mantissa, where the kernel for few tokens has all 24.
//
// What comes out is what products of the streams with each other need, too: a lane has its part of both operands.
//
// Zero times what is not finite is NaN, which would reach the neighbours. So where one comes out, which products tell,
// the tile's streams are read again and tokens mixed one by one: others' terms are zeros in both ways, and add up to
// the same bits.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"
#include "tensor_core.cuh"

namespace dsv4::resident {

template <Hyper kHyper>
struct Mixing {
  static constexpr int kPairTokens = 2;
  static constexpr int kPartGroups = kGroups / kParts, kSteps = 2 * kPartGroups;

  static_assert(kParts == kMixers * kPairTokens / kTile);

  const Arguments& a;
  Memory& m;
  const int tiles, count;
  const int warp = threadIdx.x / 32 - kFirst - kMultipliers, pair = warp / kParts, lane = threadIdx.x % 32;
  uint32_t streams_place, layer_place, mixed_place, comb_place, post_place;

  // Matrices that are loaded: of a chunk streams and outputs, and of the next; those that are stored: four chunks.
  __device__ Mixing(const Arguments& arguments, Memory& memory, const Share& own_share)
      : a(arguments), m(memory), tiles(own_share.tiles), count(own_share.count) {
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
    split(one, other, first, second);
    first &= own, second &= own;
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
  // One token after the other.
  __device__ void mix_apart(uint32_t from, uint32_t to, const uint32_t (&weights)[4]) const {
    const uint32_t own_lane = lane_again();
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

  // The eight rows with each other, of sixteen columns: what a lane has of them is its part of both operands.
  __device__ static void multiply_rows(float (&s)[4], const uint32_t (&v)[4]) {
    multiply(s, v[0], 0, v[1], 0, v[0], v[1]);
    multiply(s, v[2], 0, v[3], 0, v[2], v[3]);
  }
  __device__ static void multiply_all(float (&s)[4], uint32_t from) {
#pragma unroll
    for (float& one : s) one = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t v[4];
      load_matrices(v, at(from, step));
      multiply_rows(s, v);
    }
  }
  // A lane has two of a row, the first two of four; those of two tokens are nobody's. In order: 00 10 11 02 12 03 13 22
  // 32 33.
  __device__ void store_products(uint32_t slot, const float (&sum)[4]) const {
    const uint32_t own_lane = lane_again();
    const uint32_t token = own_lane / 4 / kStreams, one = own_lane / 4 % kStreams, half = own_lane % 2;
    const uint32_t place = half != 0 ? one + 5 : one != 0 ? 2 * one - 1 : 0;
    const uint32_t to = shared_place(m.products[slot][warp % kParts][pair * kPairTokens + token]) + place * 4;
    if (own_lane % 4 / 2 != token || one < 2 * half) return;
    store_shared(to, sum[0]);
    if (one > 2 * half) store_shared(to + 4, sum[1]);
  }

  // The warp's part of a tile as it was before it was mixed; tokens that are not there are zeros.
  __device__ void restore(int n, uint32_t slot) const {
    constexpr int kRowChunks = kPartGroups * 8, kTask = kPairTokens * kStreams * kRowChunks;
    constexpr int64_t kWords = kHidden / kVector;
    const Share share(a);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kTask; i += 32) {
      const int chunk = i % kRowChunks, stream = i / kRowChunks % kStreams;
      const int token = pair * kPairTokens + i / kRowChunks / kStreams;
      uint4 v{};
      if (token < share.tokens(n)) {
        const int64_t row = (share.token(n) + token) * kStreams + stream;
        v = a.mix.residual[row * kWords + share.rank * (kColumns / kVector) + warp % kParts * kRowChunks + chunk];
      }
      const uint32_t group = (warp % kParts * kPartGroups + chunk / 8) * kGroupBytes;
      store_shared(shared_place(m.streams[slot]) + group + place_of_chunk(token, stream, chunk % 8), v);
    }
    __syncwarp();
  }

  __device__ void mix_tile(int n, uint32_t slot, uint32_t layer_slot, float (&products)[4]) const {
    const uint32_t comb = comb_place + layer_slot * (kTile * kStreams * 16);
    const uint32_t post = post_place + layer_slot * (kTile * 16);
    const float by[3] = {load_shared_float(comb), load_shared_float(comb + 16), load_shared_float(post)};
    const uint32_t to = mixed_place + slot * kSlotBytes;
    const bool of_layer = lane / 8 % 2 != 0;
    const uint32_t from = of_layer ? layer_place + layer_slot * kLayerBytes : streams_place + slot * kSlotBytes;
    uint32_t v[2][2][4], weights[4];
    load(v[0], at(from, 0));
    load(v[1], at(from, 1));
    const int group = lane / 4, quarter = lane % 4;
    const bool there = pair * kPairTokens + group / kStreams < count - n * kTile;
    take(by[0], by[1], there && quarter / 2 == group / kStreams ? 0xffffffff : 0, weights[0], weights[1]);
    take(by[2], by[2], !there || quarter != pair ? 0 : group / kStreams == 0 ? 0x0000ffff : 0xffff0000, weights[2],
         weights[3]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto& in = v[step % 2];
      uint32_t o[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) o[c] = mixed(weights, in[c / 2][c % 2 * 2], in[c / 2][c % 2 * 2 + 1]);
      if (step + 2 < kSteps) load(v[step % 2], at(from, step + 2));
      store_matrices(at(to, step), o);
      multiply_rows(products, o);
    }
    // A product of what is not finite is not, either.
    const float sum = fabsf(products[0]) + fabsf(products[1]);
    if (__any_sync(kWholeWarp, !(sum < INFINITY))) {
      __syncwarp();
      restore(n, slot);
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) mix_apart(at(from, step), at(to, step), weights);
      __syncwarp();
      multiply_all(products, to);
    }
  }

  __device__ void run() const {
    uint32_t slot = 0, parity = 0, layer_slot = 0;
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      wait(m.there[slot], parity);
      float products[4] = {};
      if constexpr (kHyper == Hyper::post_pre) {
        mix_tile(n, slot, layer_slot, products);
      } else {
        multiply_all(products, mixed_place + slot * kSlotBytes);
      }
      store_products(slot, products);
      __syncwarp();
      if (lane == 0) arrive(m.mixed[slot]);
      if (++slot == kSlots) slot = 0, parity ^= 1;
      if (++layer_slot == kLayers) layer_slot = 0;
    }
  }
};

}  // namespace dsv4::resident
