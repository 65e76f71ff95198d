// What becomes of a tile's values: a warp for each of the block's four tokens, as in hyper_connection_owner.cuh. Comb
// is made by one of them in turn, a lane a token: a warp a token takes longer than a stage.
#pragma once
#include "hyper_connection_staged.cuh"
#include "hyper_connection_staged_access.cuh"

namespace dsv4::staged {

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
  s.normalise_columns(eps);
  for (int i = 1; i < iterations; ++i) {
    s.normalise_rows(eps);
    s.normalise_columns(eps);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float row = s.row[i] * s.by;
    const float4 v{row * s.k[i][0] * s.column[0], row * s.k[i][1] * s.column[1], row * s.k[i][2] * s.column[2],
                   row * s.k[i][3] * s.column[3]};
    *reinterpret_cast<float4*>(to + i * 4) = v;
  }
}

struct Answers {
  static constexpr int kSumBytes = kOwned * kBlocks * (kSums + kSquares) * 4, kAnswerBytes = kTile * 20;

  const Arguments& a;
  Memory& m;
  const Share& share;
  const int which = threadIdx.x / 32 % kOwners, lane = threadIdx.x % 32, row = share.rank * kOwned + which;

  __device__ void run() const {
    const CollapseArguments& c = a.collapse;
    const Weighing<Hyper::pre> weigh{c};
    const bool arms = which == 0 && lane == 0;
    for (int i = 0; i < share.tiles; ++i) {
      if (arms) arrive_and_expect(m.sums, kSumBytes);
      wait(m.sums, i & 1);
      // All blocks have sent this tile's values, and had the last one's answers before.
      if (arms) arrive_and_expect(m.answers, kAnswerBytes);
      const Weighed found = weigh(m.received[which]);
      if (lane < kBlocks) {
        const uint32_t barrier = place_at(&m.answers, lane);
        send(place_at(&m.weights[i % 2][row], lane), found.weights, barrier);
        send(place_at(&m.factor[i % 2][row], lane), found.factor, barrier);
      }
      const int first = share.first(i);
      const bool posts = row < share.count(i) && lane >= kStreams && lane < 2 * kStreams;
      if (posts) c.post[(first + row) * kStreams + lane - kStreams] = 2.0f * found.gate;
      if (lane < kSums) m.logits[i % 2][which][lane] = found.mix;
      meet<32 * kOwners>(kWeighed);
      const int other = share.rank * kOwned + lane;
      if (i % kOwners == which && lane < kOwned && other < share.count(i)) {
        make_comb(m.logits[i % 2][lane] + 2 * kStreams, c.comb + (first + other) * 16, c.hc_eps, c.iterations);
      }
    }
  }
};

}  // namespace dsv4::staged
