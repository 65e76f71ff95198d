// What becomes of a token's values: a warp of its owner answers, as in hyper_connection_owner.cuh. Combs are made when
// all has been multiplied, a lane a token: nobody waits for them, and a warp a token takes a quarter of what the block
// can issue.
#pragma once
#include "hyper_connection_resident.cuh"
#include "hyper_connection_resident_access.cuh"

namespace dsv4::resident {

// Comb of one token, from its sixteen logits.
__device__ inline void make_comb(const float* logits, float* to, float eps, int iterations) {
  Sinkhorn s;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 v = *reinterpret_cast<const float4*>(logits + i * 4);
    const float most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    const float4 e{__expf(v.x - most), __expf(v.y - most), __expf(v.z - most), __expf(v.w - most)};
    const float sum = (e.x + e.y) + (e.z + e.w);
    s.k[i][0] = __fdividef(e.x, sum) + eps;
    s.k[i][1] = __fdividef(e.y, sum) + eps;
    s.k[i][2] = __fdividef(e.z, sum) + eps;
    s.k[i][3] = __fdividef(e.w, sum) + eps;
  }
  s.begin(eps);
  for (int i = 1; i < iterations; ++i) s.iterate(eps);
  const float by = reciprocal(s.product);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float row = s.row[i] * by;
    const float4 v{row * s.k[i][0] * s.column[0], row * s.k[i][1] * s.column[1], row * s.k[i][2] * s.column[2],
                   row * s.k[i][3] * s.column[3]};
    *reinterpret_cast<float4*>(to + i * 4) = v;
  }
}

struct Answers {
  const Arguments& a;
  Memory& m;
  const Share& share;
  const int lane = threadIdx.x % 32;

  __device__ void run() const {
    const CollapseArguments& c = a.collapse;
    const Weighing<Hyper::pre> weigh{c};
    const int row = share.rank % kTile, own = share.own();
    uint32_t place = 0, parity = 0, slot = share.rank / kTile;
#pragma unroll 1
    for (int k = 0; k < own; ++k) {
      wait(m.sums[place], parity);
      if (lane == 0) arrive_and_expect(m.sums[place], kBlocks * kSentBytes);
      const Products values = weigh.values(m.received[place]);
      const float mix = weigh.mix(values);
      if (lane >= 2 * kStreams && lane < kSums) m.logits[k][lane - 2 * kStreams] = mix;
      __syncwarp();
      if (lane == 0 && k == own - 1) arrive(m.answered);  // the last comb takes longer than what is left here
      const Weighed found = weigh.answer(values, mix);
      if (lane < kBlocks) {
        const uint32_t barrier = place_at(&m.answers[slot], lane), to = place_at(m.answer[slot][row], lane);
        send(to, found.weights, barrier);
        send(to + 16, found.factor, barrier);
      }
      const bool posts = lane >= kStreams && lane < 2 * kStreams;
      if (posts) c.post[share.own_token(k) * kStreams + lane - kStreams] = 2.0f * found.gate;
      if (++place == kReceived) place = 0, parity ^= 1;
      slot = slot + 2 < kSlots ? slot + 2 : slot + 2 - kSlots;
    }
  }
};

// Of the block's own tokens; thread `k` of those that have nothing else to do.
__device__ inline void make_combs(const Arguments& a, Memory& m, int k) {
  const CollapseArguments& c = a.collapse;
  const Share share(a);
  const int own = share.own();
  if (own == 0) return;
  wait(m.answered, 0);
  if (k < own) make_comb(m.logits[k], c.comb + share.own_token(k) * (kStreams * kStreams), c.hc_eps, c.iterations);
}

}  // namespace dsv4::resident
