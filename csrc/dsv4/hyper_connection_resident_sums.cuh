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

  __device__ void send_quad(int n, uint32_t place, int quad, const float4& sum) const {
    const int token = which * kEach + quad / kQuads, value = quad % kQuads * 4;
    if (token >= share.tokens(n)) return;
    const int owner = n % 2 * kTile + token;
    send(place_at(m.received[place][share.rank] + value, owner), sum, place_at(&m.sums[place], owner));
  }
  // A lane's quad, and for the first lanes one of those that remain.
  __device__ void send_quads(int n, uint32_t place) const {
    static_assert(kEach * kQuads > 32 && kEach * kQuads <= 64);
    const int quads[2] = {lane, min(32 + lane, kEach * kQuads - 1)};
    float4 sum[2]{};
#pragma unroll 2
    for (int i = 0; i < kMultipliers; ++i) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float* from = m.part[n % 2][i][which * kEach] + quads[k] * 4;
        const float4 v = *reinterpret_cast<const float4*>(from);
        sum[k].x += v.x, sum[k].y += v.y, sum[k].z += v.z, sum[k].w += v.w;
      }
    }
    send_quad(n, place, quads[0], sum[0]);
    if (lane < kEach * kQuads - 32) send_quad(n, place, quads[1], sum[1]);
  }
  __device__ void run() const {
    uint32_t place = 0, slot = 0;
#pragma unroll 1
    for (int n = 0; n < share.tiles; ++n) {
      wait(m.full[n % 2], n / 2 & 1);
      // The answers that were there have been read: the tile has been mixed where that one was. Its own cannot all be
      // there before its sums are sent.
      if (which == 0 && lane == 0) arrive_and_expect(m.answers[slot], share.tokens(n) * kAnswerBytes);
      send_quads(n, place);
      __syncwarp();
      if (lane == 0) arrive(m.empty[n % 2]);
      if (n % 2 == 1 && ++place == kReceived) place = 0;
      if (++slot == kSlots) slot = 0;
    }
  }
};

}  // namespace dsv4::resident
