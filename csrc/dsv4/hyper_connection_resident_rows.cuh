// What a warp does with its token of a tile: it mixes the streams in shared memory, stores them, and collapses them
// when the weights are there.
#pragma once
#include "hyper_connection_resident_access.cuh"
#include "hyper_connection_resident_arithmetic.cuh"

namespace dsv4::resident {

// A lane has eight columns.
template <Hyper kHyper>
struct Rows {
  static constexpr bool kMixing = kHyper == Hyper::post_pre;
  static constexpr uint32_t kRowBytes = kHidden * 2, kTokenBytes = kStreams * kRowBytes;

  Memory& m;
  const int row = threadIdx.x / 32 - kFirst - kMultipliers, lane = threadIdx.x % 32;
  const int tiles, limit;  // from the limit on there is no token for this warp
  const uint32_t group = lane / 8, chunk = place_of_chunk(row, lane % 8);
  const uint32_t place = shared_place(m.streams) + group * kGroupBytes + chunk;
  const uint32_t layer_place = shared_place(m.layer) + group * kStreamBytes + chunk;
  const uint32_t post_place = shared_place(m.post) + row * 16, comb_place = shared_place(m.comb) + row * kStreams * 16;
  uint8_t *mixed, *collapsed;  // the lane's part of the last tile in the outs

  __device__ Rows(const Arguments& a, Memory& memory, const Share& share)
      : m(memory), tiles(share.tiles), limit(share.count - row) {
    const int64_t token = share.first + row - kTile;  // of the tile before the first
    const uint32_t column = share.rank * kColumns * 2 + lane * 16;
    if constexpr (kMixing) mixed = reinterpret_cast<uint8_t*>(a.mix.mixed) + token * kTokenBytes + column;
    collapsed = reinterpret_cast<uint8_t*>(a.collapse.layer_in) + token * kRowBytes + column;
  }
  // Of the norm's weights a column a thread, to where a lane finds its own.
  __device__ void take_norm(const CollapseArguments& c, int rank) const {
    static_assert(kColumns == 32 * kRows);
    const int own = row * 32 + lane, column = rank * kColumns + own;
    const float weight = c.weight_is_bf16 ? low(static_cast<const uint16_t*>(c.norm_weight)[column])
                                          : static_cast<const float*>(c.norm_weight)[column];
    reinterpret_cast<float*>(m.norm[own / 4 % 2])[own / 8 * 4 + own % 4] = weight;
    meet<32 * kRows>(kNormed);
  }

  __device__ void mix_streams(uint32_t slot, uint32_t layer_slot) const {
    const uint32_t own = place + slot * kSlotBytes;
    uint4 from[kStreams], to[kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) from[j] = load_shared(own + j * kStreamBytes);
    const uint4 layer = load_shared(layer_place + layer_slot * kLayerBytes);
    float4 by[1 + kStreams] = {load_shared_floats(post_place + layer_slot * kTile * 16)};
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      by[1 + j] = load_shared_floats(comb_place + layer_slot * kTile * kStreams * 16 + j * 16);
    }
    mix(from, layer, by, to);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) store_shared(own + j * kStreamBytes, to[j]);
#pragma unroll
    for (int j = 0; j < kStreams; ++j) store(mixed + j * kRowBytes, to[j]);
  }
  __device__ void mix_tile(int n, uint32_t slot, uint32_t parity, uint32_t layer_slot) {
    wait(m.there[slot], parity);
    if constexpr (kMixing) {
      advance(mixed, kTile * kTokenBytes);
      if (n * kTile < limit) mix_streams(slot, layer_slot);
    }
    __syncwarp();
    if (lane == 0) arrive(m.mixed[slot]);
  }

  __device__ void collapse_tile(int n, uint32_t slot, uint32_t parity) {
    advance(collapsed, kTile * kRowBytes);
    uint4 from[kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) from[j] = load_shared(place + slot * kSlotBytes + j * kStreamBytes);
    wait(m.answers[slot], parity);
    if (n * kTile < limit) {
      const float4 first = m.norm[0][lane], last = m.norm[1][lane];
      const Eight norm{first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
      const float4* answer = m.answer[slot][row];
      store(collapsed, collapse(from, answer[0], answer[1].x, norm));
    }
    __syncwarp();
    if (lane == 0) arrive(m.left[slot]);
  }

  __device__ void run() {
    uint32_t slot = 0, parity = 0, layer_slot = 0, old = 0, old_parity = 0;
#pragma unroll 1
    for (int n = 0; n < tiles + kLag; ++n) {
      if (n < tiles) {
        mix_tile(n, slot, parity, layer_slot);
        if (++slot == kSlots) slot = 0, parity ^= 1;
        if (++layer_slot == kLayers) layer_slot = 0;
      }
      if (n >= kLag) {
        collapse_tile(n - kLag, old, old_parity);
        if (++old == kSlots) old = 0, old_parity ^= 1;
      }
    }
  }
};

}  // namespace dsv4::resident
