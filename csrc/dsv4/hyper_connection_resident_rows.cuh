// What a warp does with its token of a tile: it collapses the streams when their weights are there.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"

namespace dsv4::resident {

// The streams' weighted sum, rounded, times its norm's factor and weights.
__device__ inline uint4 collapse(const uint4 (&streams)[kStreams], float4 weights, float factor, const Eight& norm) {
  Eight total;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const Eight in = unpack(streams[j]);
    const float weight = j == 0 ? weights.x : j == 1 ? weights.y : j == 2 ? weights.z : weights.w;
#pragma unroll
    for (int v = 0; v < kVector; ++v) total.x[v] = j == 0 ? weight * in.x[v] : fmaf(weight, in.x[v], total.x[v]);
  }
  Eight rounded = rounded_to_bf16(total);
#pragma unroll
  for (int v = 0; v < kVector; ++v) rounded.x[v] = rounded.x[v] * factor * norm.x[v];
  return pack(rounded);
}

// A lane has eight columns.
struct Rows {
  static constexpr uint32_t kRowBytes = kHidden * 2;

  Memory& m;
  const int row = threadIdx.x / 32 - kFirst - kMultipliers - kMixers, lane = threadIdx.x % 32;
  const int tiles, limit;  // from the limit on there is no token for this warp
  const uint32_t step;     // bytes of the outs from a tile to the next
  uint8_t* collapsed;      // the lane's part of the last tile in the outs
  uint32_t place[kStreams];

  __device__ Rows(const Arguments& a, Memory& memory, const Share& share)
      : m(memory), tiles(share.tiles), limit(share.count - row), step(share.step * kRowBytes) {
    const int64_t token = share.first + row - share.step;  // of the tile before the first
    const uint32_t column = share.rank * kColumns * 2 + lane * 16;
    collapsed = reinterpret_cast<uint8_t*>(a.collapse.layer_in) + token * kRowBytes + column;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      place[j] = shared_place(m.streams) + lane / 8 * kGroupBytes + place_of_chunk(row, j, lane % 8);
    }
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

  __device__ void collapse_tile(int n, uint32_t slot, uint32_t parity) {
    advance(collapsed, step);
    wait(m.answers[slot], parity);
    uint4 from[kStreams];
#pragma unroll
    for (int j = 0; j < kStreams; ++j) from[j] = load_shared(place[j] + slot * kSlotBytes);
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
    uint32_t slot = 0, parity = 0;
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      collapse_tile(n, slot, parity);
      if (++slot == kSlots) slot = 0, parity ^= 1;
    }
  }
};

}  // namespace dsv4::resident
