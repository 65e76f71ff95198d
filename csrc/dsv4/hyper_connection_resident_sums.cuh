// What the multiplying warps have made, added up and sent to the blocks that own the tokens.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"

namespace dsv4::resident {

// A warp has four of a tile's tokens; a lane adds up four values of one.
struct Sums {
  static constexpr int kEach = kTile / kAdders, kQuads = kValues / 4;

  Memory& m;
  const Share& share;
  const int which = threadIdx.x / 32 % kAdders, lane = threadIdx.x % 32;

  __device__ void send_quad(int n, uint32_t place, int quad) const {
    const int token = which * kEach + quad / kQuads, value = quad % kQuads * 4;
    if (token >= share.tokens(n)) return;
    const auto& parts = m.part[n % 2];
    float4 sum{};
#pragma unroll
    for (int i = 0; i < kMultipliers; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(parts[i][token] + value);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const int owner = n % 2 * kTile + token;
    send(place_at(m.received[place][share.rank] + value, owner), sum, place_at(&m.sums[place], owner));
  }
  __device__ void run() const {
    uint32_t place = 0, slot = 0;
#pragma unroll 1
    for (int n = 0; n < share.tiles; ++n) {
      wait(m.full[n % 2], n / 2 & 1);
      // The answers that were there have been read: the tile has been mixed where that one was. Its own cannot all be
      // there before its sums are sent.
      if (which == 0 && lane == 0) arrive_and_expect(m.answers[slot], share.tokens(n) * kAnswerBytes);
      send_quad(n, place, lane);
      if (lane < kEach * kQuads - 32) send_quad(n, place, 32 + lane);
      __syncwarp();
      if (lane == 0) arrive(m.empty[n % 2]);
      if (n % 2 == 1 && ++place == kReceived) place = 0;
      if (++slot == kSlots) slot = 0;
    }
  }
};

}  // namespace dsv4::resident
