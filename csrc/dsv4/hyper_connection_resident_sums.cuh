// What the multiplying warps have made, added up and sent to the blocks that own the tokens.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"

namespace dsv4::resident {

// A warp has four of a tile's tokens: 24 quads of sums, of which the multiplying warps have made a part each, and 12 of
// the streams' products, of which two mixing warps have. A lane adds up one, or one of either.
struct Sums {
  static constexpr int kEach = kTile / kAdders, kSumQuads = kSums / 4, kProductQuads = kProducts / 4;

  Memory& m;
  const Share& share;
  const int which = threadIdx.x / 32 % kAdders, lane = threadIdx.x % 32;

  __device__ void send_quad(int n, uint32_t place, int token, int value, const float4& sum) const {
    if (token >= share.tokens(n)) return;
    const int owner = n % 2 * kTile + token;
    send(place_at(m.received[place][share.rank] + value, owner), sum, place_at(&m.sums[place], owner));
  }
  __device__ void send_sums(int n, uint32_t place) const {
    const int token = which * kEach + lane / kSumQuads, value = lane % kSumQuads * 4;
    float4 sum{};
#pragma unroll 4
    for (int i = 0; i < kMultipliers; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(m.part[n % 2][i][token] + value);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    send_quad(n, place, token, value, sum);
  }
  __device__ void send_products(int n, uint32_t place, uint32_t slot) const {
    const int token = which * kEach + lane / kProductQuads, quad = lane % kProductQuads;
    const float4 a = m.products[slot][0][token][quad], b = m.products[slot][1][token][quad];
    send_quad(n, place, token, kSums + quad * 4, {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w});
  }
  __device__ void run() const {
    uint32_t place = 0, slot = 0;
#pragma unroll 1
    for (int n = 0; n < share.tiles; ++n) {
      wait(m.full[n % 2], n / 2 & 1);
      // The answers that were there have been read: the tile has been mixed where that one was. Its own cannot all be
      // there before its sums are sent.
      if (which == 0 && lane == 0) arrive_and_expect(m.answers[slot], share.tokens(n) * kAnswerBytes);
      if (lane < kEach * kProductQuads) send_products(n, place, slot);
      if (lane < kEach * kSumQuads) send_sums(n, place);
      __syncwarp();
      if (lane == 0) arrive(m.empty[n % 2]);
      if (n % 2 == 1 && ++place == kReceived) place = 0;
      if (++slot == kSlots) slot = 0;
    }
  }
};

}  // namespace dsv4::resident
